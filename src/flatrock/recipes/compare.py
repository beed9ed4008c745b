"""Evaluated runs, result files and rows of results files -> verdicts on the same samples, for side-by-side reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import StateError
from flatrock.core.records import Result
from flatrock.core.registry import unknown
from flatrock.core.rows import WORST, Row, read_rows
from flatrock.engine.folder import RunFolder
from flatrock.recipes.build import build_threat
from flatrock.recipes.load import library, load_recipe
from flatrock.recipes.results import verdicts


@dataclass(frozen=True, kw_only=True, eq=False)
class Judged:
    """A model and the verdict on every sample: `right[name][i]`, name `clean`, an attack, a plan or `worst case`.

    `options` are those of each attack where they are known; `ids` the samples' places, None for all in order.
    """

    name: str
    right: Mapping[str, Tensor]
    threat: str
    data: str
    ids: Tensor | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()


def judged(source: str) -> list[Judged]:
    """What there is to compare in a run folder (its best epoch), a result file, or a results file.

    Of a results file every row that follows its recipe, or, as `FILE:RECIPE`, those of one recipe.
    """
    path, wanted = Path(source), ""
    if not path.exists() and ".json:" in source:
        before, wanted = source.rsplit(":", 1)
        path = Path(before)
    if path.is_dir():
        return [_of_run(path)]
    rows = read_rows(path)
    if rows is None:
        return [_judged(Result.from_json(path.read_text(), source), source)]
    whole = [row for row in rows if row.comparable]
    chosen = [row for row in whole if wanted in ("", row.recipe)]
    if wanted and not chosen:
        raise StateError(f"{path}: {unknown('row', wanted, {row.recipe for row in whole})}")
    return [_of_row(row, path) for row in chosen]


def _of_run(folder: Path) -> Judged:
    info = RunFolder(folder).read_info()
    file = folder / f"result-{'average-best' if info.get('averages') else 'best'}.json"
    if not file.is_file():
        others = sorted(p.name for p in folder.glob("result-*.json"))
        there = f"; or name one of {', '.join(others)} in it" if others else ""
        raise StateError(f"{folder} has no {file.name}; run `flatrock eval {folder}` first{there}")
    return _judged(Result.from_json(file.read_text(), str(file)), str(folder))


def _judged(result: Result, name: str) -> Judged:
    return Judged(
        name=name,
        right={**verdicts(result), WORST: result.worst},
        threat=f"{result.threat['norm']} eps {result.threat['eps']:.4g}",
        data=str(result.provenance.get("data", f"{result.n} samples")),
        ids=result.ids,
        options=result.attacks,
        marks=result.marks,
    )


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
        right={**score.right, WORST: torch.stack(list(score.right.values())).all(0)},
        threat=f"{threat.norm} eps {threat.eps:.4g}",
        data=f"{recipe.data.name} test, {score.n} of {score.n} samples",
        marks=score.marks,
    )


def check_alike(models: Sequence[Judged]) -> None:
    """StateError unless all were asked about the same samples under the same threat."""
    for one, other in combinations(models, 2):
        for a, b in ((one.threat, other.threat), (one.data, other.data)):
            if a != b:
                raise StateError(f"{one.name} ({a}) and {other.name} ({b}) cannot be compared; evaluate both alike")
        if one.ids is not None and other.ids is not None and not torch.equal(one.ids, other.ids):
            raise StateError(f"{one.name} and {other.name} are of other samples of one test set; evaluate both alike")


def unlike(models: Sequence[Judged]) -> list[str]:
    """The attacks that share a name, but not their options."""
    known: dict[str, list[Any]] = {}
    for model in models:
        for name, options in model.options.items():
            known.setdefault(name, []).append(options)
    return sorted(name for name, all_of in known.items() if any(options != all_of[0] for options in all_of))
