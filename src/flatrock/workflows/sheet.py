"""Runs and result files -> a flat table, one line per result, for a spreadsheet or pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatrock.core.errors import StateError
from flatrock.core.files import json_text
from flatrock.core.progress import Progress
from flatrock.core.provenance import checkpoint_of
from flatrock.core.records import Result, read_result
from flatrock.core.rows import read_rows
from flatrock.engine.folder import RunFolder
from flatrock.recipes.restore import stored_recipe
from flatrock.recipes.schema import Recipe
from flatrock.workflows.results import changes, judged, of_other_weights, other_sources

Line = dict[str, Any]
# Columns before what tells runs of one recipe apart, those before the accuracies, and those behind them.
WHO = ("run", "recipe", "changes")
WHAT = ("seed", "status", "model", "which", "epoch", "data", "n", "norm", "eps", "votes", "attack_seed", "attacks")
BEHIND = ("worst_case", "worst_case_rounded", "findings", "marks", "stale", "file")


@dataclass(frozen=True)
class Sheet:
    """A header and a line for each result; `stale` are the files of other weights than their runs have now, `bare` the
    runs without a result and their status, each of which has a line without numbers. `again` are files without a line:
    another of their run answers the very same question."""

    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    stale: tuple[Path, ...]
    bare: tuple[tuple[Path, str], ...]
    again: tuple[Path, ...] = ()


@dataclass(frozen=True)
class _Found:
    """A result file, or a run that has none: what is said of it, the recipe of its run, accuracies by attack."""

    line: Line
    recipe: Recipe | None = None
    question: str | None = None  # a digest of all that was asked, and of whom
    shares: Mapping[str, float | None] = field(default_factory=dict)


def sheet(sources: Sequence[Path], progress: Progress | None = None) -> Sheet:
    """The results in run folders, whatever they were asked, and those in result files; StateError if one is damaged.

    Accuracies are fractions. Keys in which the recipes of runs differ have a column each.
    """
    places = list(dict.fromkeys(place for source in sources for place in _places(source)))
    runs = dict.fromkeys(path for path, _ in places if path is not None)
    recipes = {path: stored_recipe(RunFolder(path), progress) for path in runs}  # what is odd of one is told once
    every = [_line(path, file, None if path is None else recipes[path]) for path, file in places]
    found, again = _once(every)
    keys = _told_apart([one.recipe for one in found if one.recipe is not None])
    attacks = dict.fromkeys(name for one in found for name in one.shares)
    fixed = {*WHO, *keys, *WHAT, *BEHIND}
    columns = {name: f"attack {name}" if name in fixed else name for name in attacks}
    header = (*WHO, *keys, *WHAT, *columns.values(), *BEHIND)
    rows = []
    for one in found:
        own = {} if one.recipe is None else judged(one.recipe)
        cells = {**{key: _cell(own.get(key)) for key in keys}, **one.line}
        cells |= {columns[name]: share for name, share in one.shares.items()}
        rows.append(tuple("" if cells.get(name) is None else cells[name] for name in header))
    lines = [one.line for one in found]
    stale = tuple(Path(line["file"]) for line in lines if line.get("stale"))
    bare = tuple((Path(line["run"]), str(line["status"])) for line in lines if "file" not in line)
    return Sheet(header, tuple(rows), stale, bare, again)


def _once(found: Sequence[_Found]) -> tuple[list[_Found], tuple[Path, ...]]:
    """Each answer once, and the files that repeat one: counted twice, it would look like two."""
    kept, again = [], []
    seen: set[tuple[Any, ...]] = set()
    for one in found:
        who = (one.line.get("run"), one.line.get("which"), one.question)
        if one.question is not None and who in seen:
            again.append(Path(one.line["file"]))
        else:
            kept.append(one)
            seen.add(who)
    return kept, tuple(again)


def _places(source: Path) -> list[tuple[Path | None, Path | None]]:
    """Run folders and result files in them, or None where there is no such."""
    if not source.is_dir():
        if source.suffix == ".json" and read_rows(source) is not None:
            raise StateError(f"{source} holds rows of many runs; name run folders, or result-*.json files")
        run = source.parent
        return [(run if (run / "run.json").is_file() else None, source)]
    RunFolder(source).read_info()  # or it is none
    files = sorted(source.glob("result-*.json"), key=lambda file: file.stem)  # the recipe's own plan first
    return [(source, file) for file in files] or [(source, None)]


def _line(path: Path | None, file: Path | None, recipe: Recipe | None) -> _Found:
    line: Line = {}
    result = None if file is None else read_result(file)
    if path is not None and recipe is not None:
        folder = RunFolder(path)
        info = folder.read_info()
        told = [*changes(recipe), *other_sources(recipe, info.get("provenance", {}))]
        line |= {"run": str(path), "recipe": str(info.get("name", recipe.name)), "changes": "; ".join(told)}
        line |= {"seed": recipe.seed, "status": info["status"]}
        if result is not None:
            which = checkpoint_of(result.provenance)
            line["stale"] = int(of_other_weights(result, which, folder))
    if result is None:
        return _Found(line, recipe)
    about = result.provenance
    known = {"recipe": about.get("recipe"), "seed": about.get("train_seed")} | line
    return _Found({**known, **_asked(result), "file": str(file)}, recipe, about.get("question"), _shares(result))


def _asked(result: Result) -> Line:
    """What was asked of whom, and what a reader of the answer must know."""
    about = result.provenance
    return {
        "model": about.get("model"),
        "which": checkpoint_of(about) if "checkpoint" in about else None,
        "epoch": about.get("epoch"),
        "data": about.get("data"),
        "n": result.n,
        "norm": result.threat.get("norm"),
        "eps": result.threat.get("eps"),
        "votes": about.get("votes", 1),
        "attack_seed": about.get("seed"),
        "attacks": ", ".join(result.per_attack),
        "worst_case": result.robust,
        "worst_case_rounded": result.robust_rounded,
        "findings": " ".join(finding.code for finding in result.findings),
        "marks": " ".join(result.marks),
    }


def _shares(result: Result) -> dict[str, float | None]:
    """Accuracies by attack and plan, and mean distances where they were measured."""
    far = {f"mean_distance {name}": mean for name, mean in result.mean_distance.items()}
    return {"clean": result.clean, **result.per_attack, **far}


def _told_apart(recipes: Sequence[Recipe]) -> list[str]:
    """The keys that decide weights in which recipes differ; the seed has a column anyway."""
    all_of = [judged(recipe) for recipe in recipes]
    keys = {key for own in all_of for key in own} - {"seed", "evaluate.attacks"}
    return sorted(key for key in keys if any(own.get(key) != all_of[0].get(key) for own in all_of))


def _cell(value: Any) -> Any:
    return json_text(value) if isinstance(value, list | dict) else value
