"""Which results of run folders are compared: the usual ones, or else the one evaluation the runs have in common."""

from __future__ import annotations

import shlex
from collections.abc import Hashable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.files import json_text
from flatrock.core.records import read_result
from flatrock.core.registry import unknown
from flatrock.core.rows import WORST
from flatrock.engine.folder import RunFolder
from flatrock.recipes.restore import CHOICES, EPOCH
from flatrock.workflows.compare import Judged, judged, judged_result, other_question
from flatrock.workflows.results import of_other_weights, told_stale

# So many choices are listed; more are counted.
LISTED = 8


def compared(sources: Sequence[str], which: str = "auto") -> tuple[list[Judged], str]:
    """What there is to compare in runs, result files and results files, and which results of runs it is, if not the
    usual ones (the recipe's own plan). `which` are the weights of runs: auto, best, last, ..., epoch-0010.

    A usual result of other weights than its run has now is refused; others of such are passed over."""
    _check_which(which, sources)
    usual = {source: _usual(Path(source), which) for source in sources if Path(source).is_dir()}
    chosen, note = usual, ""
    if all(file.is_file() for file in usual.values()):
        for file in usual.values():
            if _stale(file, file):
                raise StateError(told_stale(file, _evaluation(file)))
    else:
        given = [model for source in sources if source not in usual for model in judged(source)]
        chosen, note = _in_common(sources, usual, given)
    models: list[Judged] = []
    for source in sources:
        models += [judged_result(read_result(chosen[source]), source)] if source in chosen else judged(source)
    return models, note


def _check_which(which: str, sources: Sequence[str]) -> None:
    if which not in CHOICES and not EPOCH.fullmatch(which):
        raise ConfigError(unknown("checkpoint", which, CHOICES))
    if which != "auto" and not any(Path(source).is_dir() for source in sources):
        raise ConfigError(f"which: {which} is asked of run folders, and none is named; leave --which out")


def _usual(folder: Path, which: str) -> Path:
    """The result of the recipe's own plan, for `auto` of the weights that `flatrock results` takes."""
    if which == "auto":
        run = RunFolder(folder)
        which = "best" if run.run().average_collapsed else run.known_by()
    return folder / f"result-{which}.json"


def _stale(file: Path, usual: Path) -> bool:
    """Whether a result of the checkpoint of the usual one is of other weights than the run has there now."""
    return of_other_weights(read_result(file), _which(usual), RunFolder(usual.parent))


def _alike(usual: Path) -> list[Path]:
    """All results of the checkpoint of the usual one."""
    return sorted([*usual.parent.glob(usual.name), *usual.parent.glob(f"{usual.stem}-*.json")])


def _which(usual: Path) -> str:
    return usual.stem.removeprefix("result-")


def _in_common(sources: Sequence[str], usual: dict[str, Path], given: Sequence[Judged]) -> tuple[dict[str, Path], str]:
    """The one choice of a result for each run that asks all the same, and how to say so; else StateError."""
    there = {source: _questions(file, given) for source, file in usual.items()}
    shared = [key for key in next(iter(there.values())) if all(key in found for found in there.values())]
    choices = [files for key in shared for files in product(*(found[key] for found in there.values()))]
    if not choices:
        raise StateError(_nothing_in_common(usual))
    if len(choices) > 1:
        commands = [_command(sources, dict(zip(there, files, strict=True))) for files in choices]
        left = [f"... and {len(commands) - LISTED} more"] if len(commands) > LISTED else []
        listed = "\n  - ".join(["", *commands[:LISTED], *left])
        raise StateError(f"there are {len(choices)} evaluations that these runs have in common; choose one:{listed}")
    (files,) = choices
    names = sorted({file.name for file in files})
    told = f"{names[0]} of each run" if len(names) == 1 else ", ".join(map(str, files))
    return dict(zip(there, files, strict=True)), f"compared: {told}, the one evaluation they have in common"


def _questions(usual: Path, given: Sequence[Judged]) -> dict[Hashable, list[Path]]:
    """The results of the weights of the usual one, as they are now, by what was asked, if it is what the models given
    were asked."""
    found: dict[Hashable, list[Path]] = {}
    for file in (file for file in _alike(usual) if not _stale(file, usual)):
        result = read_result(file)
        model = judged_result(result, str(file))
        if all(not other_question(model, other) and _attacks_alike(model, other) for other in given):
            found.setdefault(_question(model, result.provenance.get("seed")), []).append(file)
    return found


def _question(model: Judged, seed: Any) -> Hashable:
    """Threat, votes, samples, attacks with their options, and the seed of these."""
    samples = model.digest or json_text(model.ids.tolist())
    return model.norm, model.eps, model.votes, model.data, samples, _attacks(model), str(seed)


def _attacks(model: Judged) -> str:
    """Attacks by their options, however they are called; those of a plan by name, too."""
    named = [[name, None] for name in model.right if name not in model.options and name not in ("clean", WORST)]
    tried = [["" if name in model.right else name, options] for name, options in model.options.items()]
    return json_text(sorted(map(json_text, [*named, *tried])))


def _attacks_alike(model: Judged, other: Judged) -> bool:
    """A row of a results file knows the names of its attacks alone."""
    if model.options and other.options:
        return _attacks(model) == _attacks(other)
    return set(model.right) == set(other.right)


def _nothing_in_common(usual: dict[str, Path]) -> str:
    why = {source: f"has no {file.name}" for source, file in usual.items() if not file.is_file()}
    stale = [source for source, file in usual.items() if source not in why and _stale(file, file)]
    why |= {source: f"has a {usual[source].name} of other weights than it has now" for source in stale}
    cures = "; ".join(f"run `{_evaluation(usual[source])}`" for source in why)
    told = [f"{source} {text}" for source, text in why.items()]
    older = {p for file in usual.values() for p in _alike(file) if _stale(p, file)}
    others = {
        source: [p.name + " (of other weights)" * (p in older) for p in sorted(file.parent.glob("result-*.json"))]
        for source, file in usual.items()
    }
    there = [f"{source}: {', '.join(names) or 'none'}" for source, names in others.items()]
    return "\n  - ".join([f"{'; '.join(told)}, and no other evaluation in common; {cures} first. There is", *there])


def _evaluation(usual: Path) -> str:
    """The command that makes the usual result."""
    which = _which(usual)
    folder, known_by = usual.parent, RunFolder(usual.parent).known_by()
    if EPOCH.fullmatch(which):
        return f"flatrock eval {shlex.quote(str(folder / which))}.safetensors"
    return f"flatrock eval {shlex.quote(str(folder))}{'' if which == known_by else f' --which {which}'}"


def _command(sources: Sequence[str], chosen: dict[str, Path]) -> str:
    return shlex.join(["flatrock", "compare", *(str(chosen.get(source, source)) for source in sources)])
