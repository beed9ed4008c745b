"""Result files and rows of results files -> verdicts on the same samples, for side-by-side reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import StateError
from flatrock.core.records import Result, read_result
from flatrock.core.registry import unknown
from flatrock.core.rows import WORST, Row, read_rows
from flatrock.recipes.build import build_threat
from flatrock.recipes.load import library, load_recipe
from flatrock.workflows.results_score import verdicts

# The data of an evaluation in Python that was not told what it is of.
NAMELESS = "samples without a name"


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """A model and the verdict on every sample: `right[name][i]`, name `clean`, an attack, a plan or `worst case`.

    `data` and the samples' places, `ids`, say what they are of; `digest`, where it is known, proves it. `options` are
    those of each attack where they are known. `votes` answers decided, by majority. `unfinished` says how far a run was
    that had not ended when it was evaluated. `findings` are the codes of what was found against its numbers.
    """

    name: str
    right: Mapping[str, Tensor]
    norm: str
    eps: float
    data: str
    ids: Tensor
    digest: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    collapsed: bool = False
    votes: int = 1
    unfinished: str = ""
    findings: tuple[str, ...] = ()


def judged(source: str) -> list[Judged]:
    """What there is to compare in a result file, or a results file; of run folders `in_common` knows which is meant.

    Of a results file every row that follows its recipe, or, as `FILE:RECIPE`, those of one recipe.
    """
    path, wanted = Path(source), ""
    if not path.exists() and ".json:" in source:
        before, wanted = source.rsplit(":", 1)
        path = Path(before)
    if path.suffix == ".safetensors":
        raise StateError(f"{source} holds weights; name its run folder, or the result-*.json of its evaluation")
    rows = read_rows(path)
    if rows is None:
        return [judged_result(read_result(path), source)]
    chosen = [row for row in rows if wanted in ("", row.recipe)]
    if wanted and not chosen:
        raise StateError(f"{path}: {unknown('row', wanted, {row.recipe for row in rows})}")
    whole = [row for row in chosen if row.comparable]
    if not whole:
        names = ", ".join(sorted({row.recipe for row in chosen})) or "none"
        raise StateError(
            f"{path} has no row to compare: those of {names} were changed, not finished, not evaluated or "
            "collapsed, as they are or averaged; name the run folder instead"
        )
    return [_of_row(row, path) for row in whole]


def judged_result(result: Result, name: str) -> Judged:
    """What a result says, under this name."""
    return Judged(
        name=name,
        right={**verdicts(result), WORST: result.worst},
        norm=result.threat["norm"],
        eps=result.threat["eps"],
        data=str(result.provenance.get("data", NAMELESS)),
        ids=torch.arange(result.n) if result.ids is None else result.ids,
        digest=result.provenance.get("samples_digest"),
        options={name: _options(result, name) for name in result.attacks},
        marks=result.marks,
        collapsed=result.collapsed,
        votes=int(result.provenance.get("votes", 1)),
        unfinished=str(result.provenance.get("unfinished", "")),
        findings=tuple(finding.code for finding in result.findings),
    )


def _options(result: Result, name: str) -> dict[str, Any]:
    """Those of an attack; what was crafted on another surrogate is another attack."""
    options = dict(result.attacks[name])
    if options.get("kind") == "Transfer":
        options["surrogate"] = dict(result.provenance.get("surrogate") or {}).get("weights")
    return options


def _of_row(row: Row, source: Path) -> Judged:
    """A row holds verdicts only; the recipe of its name says what they are about, as the row follows it."""
    if row.recipe not in library():
        raise StateError(
            f"{source}: the recipe {row.recipe!r} of a row is not in the library, so its test set is unknown"
        )
    recipe, score = load_recipe(row.recipe), row.scores[row.main or ""]
    threat = build_threat(recipe)
    return Judged(
        name=f"{row.recipe} (seed {row.seed})",
        right={**score.right, WORST: score.worst},
        norm=threat.norm,
        eps=threat.eps,
        data=f"{recipe.data.name} test, {score.n} of {score.n} samples",
        ids=torch.arange(score.n),
        marks=score.marks,
        findings=tuple(text.partition(":")[0] for text in score.findings),
    )


def check_alike(models: Sequence[Judged]) -> None:
    """StateError unless all were asked about the same samples under the same threat, and as often."""
    for one, other in combinations(models, 2):
        why = other_question(one, other)
        if why:
            raise StateError(f"{one.name} and {other.name} cannot be compared: {why}; evaluate both alike")


def other_question(one: Judged, other: Judged) -> str:
    """Why two models were not asked the same; nothing if they were."""
    if (one.norm, one.eps) != (other.norm, other.eps):
        return f"{one.norm} eps {one.eps:.6g} and {other.norm} eps {other.eps:.6g}"
    if one.votes != other.votes:
        return f"the majority of {one.votes} answers decided about one, of {other.votes} about the other"
    if one.data != other.data:
        return f"{one.data}, and {other.data}"
    proved = one.digest is not None and one.digest == other.digest
    if not proved and one.digest is not None and other.digest is not None:
        return "other samples (their contents differ)"
    if not torch.equal(one.ids, other.ids):
        return "other samples of one test set"
    return "" if proved or one.data != NAMELESS else "whether their samples are the same is not known"


def under_one_name(models: Sequence[Judged]) -> tuple[list[Judged], list[str]]:
    """The models with one name for attacks of the same options, that of the first model which has it; and what was
    renamed, in words.

    `pgd-5:step_size=2/255` and {name: pgd, steps: 5, step_size: 2/255} are one attack with two labels, which stay as
    they are in results: random numbers follow from them.
    """
    known: dict[str, Any] = {}
    called, told = [], []
    for model in models:
        own = {name: model.options[name] for name in model.right if name in model.options}
        names: dict[str, str] = {}
        for name, options in own.items():
            same = (n for n, o in known.items() if o == options and n not in own and n not in names.values())
            if name not in known and (found := next(same, None)) is not None:
                names[name] = found
                told.append(f"{name} of {model.name} is {found} here: its options are the same")
        known = {n: o for n, o in own.items() if n not in names} | known
        called.append(_renamed(model, names))
    return called, told


def _renamed(model: Judged, names: Mapping[str, str]) -> Judged:
    right = {names.get(name, name): flags for name, flags in model.right.items()}
    return replace(model, right=right, options={names.get(n, n): o for n, o in model.options.items()})


def other_options(models: Sequence[Judged]) -> list[str]:
    """The attacks and plans that share a name, but not their options; those of a plan's attacks are the plan's."""
    known: dict[str, list[Any]] = {}
    for model in models:
        for name, options in model.options.items():
            known.setdefault(name, []).append(options)
    odd = [name for name, all_of in known.items() if any(options != all_of[0] for options in all_of)]
    return sorted({name if name in models[0].right else name.partition("/")[0] for name in odd})
