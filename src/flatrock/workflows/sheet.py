"""Runs and result files -> a flat table, one line per result, for a spreadsheet or pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
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
from flatrock.recipes.changed import leaves
from flatrock.recipes.filled import in_full
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.restore import stored_recipe
from flatrock.recipes.schema import Recipe
from flatrock.workflows.results import changes, of_other_weights, other_sources
from flatrock.workflows.status import standing

Line = dict[str, Any]
# Columns before what tells runs of one recipe apart, those before the accuracies, and those behind them.
WHO = ("run", "recipe", "changes")
WHAT = ("seed", "status", "model", "which", "epoch", "data", "n", "norm", "eps", "votes", "attack_seed", "attacks")
BEHIND = ("worst_case", "worst_case_rounded", "findings", "marks", "main", "stale", "file")
# What a key is that is null; pandas takes an empty cell, and the word null, for a number that is missing.
NULL = "none"


@dataclass(frozen=True)
class Sheet:
    """A header and a line for each result; `stale` are the files of other weights than their runs have now, `bare` the
    runs without a result and their status, each of which has a line without numbers. `again` are files without a line,
    each with the one that answers the very same question: of their run, or of a copy of it."""

    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    stale: tuple[Path, ...]
    bare: tuple[tuple[Path, str], ...]
    again: tuple[tuple[Path, Path], ...] = ()


@dataclass(frozen=True)
class _Keys:
    """What decides the weights of a run, by dotted names: every key in effect, which of them were given, and a hash."""

    full: Mapping[str, Any]
    given: Set[str]
    hash: str

    @classmethod
    def of(cls, recipe: Recipe, recorded: Mapping[str, Any]) -> _Keys:
        """Those of a recipe; defaults are the `recorded` ones, which today's need not be."""
        full, given = (leaves(recipe.deciding(keys)) for keys in (in_full(recipe), recipe.resolved()))
        told = leaves({key: value for key, value in recorded.items() if key != "select"})
        return cls({**full, **told}, given.keys(), recipe_hash(recipe))


@dataclass(frozen=True)
class _Found:
    """A result file, or a run that has none: what is said of it, keys of its run's recipe, accuracies by attack."""

    line: Line
    keys: _Keys | None = None
    question: str | None = None  # a digest of all that was asked, and of whom
    shares: Mapping[str, float | None] = field(default_factory=dict)


def sheet(sources: Sequence[Path], progress: Progress | None = None) -> Sheet:
    """The results in run folders, whatever they were asked, and those in result files; StateError if one is damaged.

    Accuracies are fractions. Keys in which the recipes of runs differ have a column each.
    """
    places = list(dict.fromkeys(place for source in sources for place in _places(source)))
    runs = dict.fromkeys(path for path, _ in places if path is not None)
    known = {path: _Known.of(path, progress) for path in runs}  # what is odd of a recipe is told once
    every = [_line(path, file, None if path is None else known[path]) for path, file in places]
    found, again = _once(every)
    keys = _told_apart([one.keys for one in found if one.keys is not None])
    attacks = dict.fromkeys(name for one in found for name in one.shares)
    fixed = {*WHO, *keys, *WHAT, *BEHIND}
    columns = {name: f"attack {name}" if name in fixed else name for name in attacks}
    header = (*WHO, *keys, *WHAT, *columns.values(), *BEHIND)
    rows = []
    for one in found:
        own = {} if one.keys is None else one.keys.full
        cells = {**{key: _cell(own[key]) for key in keys if key in own}, **one.line}
        cells |= {columns[name]: share for name, share in one.shares.items()}
        rows.append(tuple("" if cells.get(name) is None else cells[name] for name in header))
    lines = [one.line for one in found]
    stale = tuple(Path(line["file"]) for line in lines if line.get("stale"))
    bare = tuple((Path(line["run"]), str(line["status"])) for line in lines if "file" not in line)
    return Sheet(header, tuple(rows), stale, bare, again)


def _once(found: Sequence[_Found]) -> tuple[list[_Found], tuple[tuple[Path, Path], ...]]:
    """Each answer once, and the files that repeat one: counted twice, it would look like two.

    Runs of one recipe and seed that give the same answer to a question about the same weights are copies.
    """
    kept: list[_Found] = []
    again: list[tuple[Path, Path]] = []
    seen: dict[tuple[Any, ...], Line] = {}
    for one in found:
        who = (one.keys and one.keys.hash, *(one.line.get(key) for key in ("which", "stale")), one.question)
        first = seen.get(who)
        if one.question is None or first is None:
            kept.append(one)
            seen[who] = one.line
            continue
        again.append((Path(one.line["file"]), Path(first["file"])))
        if one.line.get("run") == first.get("run") and one.line.get("main"):
            first["main"] = 1
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


@dataclass(frozen=True)
class _Known:
    """What is looked up of a run once, however many results it has."""

    recipe: Recipe
    keys: _Keys
    main: str  # the name of the file with the result it is known by

    @classmethod
    def of(cls, path: Path, progress: Progress | None) -> _Known:
        """That of this run folder."""
        recipe, main = stored_recipe(RunFolder(path), progress), standing(path).main
        recorded = RunFolder(path).read_info().get("provenance", {}).get("settings", {})
        return cls(recipe, _Keys.of(recipe, recorded), "" if main is None else main.name)


def _line(path: Path | None, file: Path | None, known: _Known | None) -> _Found:
    line: Line = {}
    result = None if file is None else read_result(file)
    if path is not None and known is not None:
        folder, recipe = RunFolder(path), known.recipe
        info = folder.read_info()
        told = [*changes(recipe), *other_sources(recipe, info.get("provenance", {}))]
        line |= {"run": str(path), "recipe": str(info.get("name", recipe.name)), "changes": "; ".join(told)}
        line |= {"seed": recipe.seed, "status": info["status"]}
        if result is not None and file is not None:
            line["stale"] = int(of_other_weights(result, checkpoint_of(result.provenance), folder))
            line["main"] = int(file.name == known.main)
    keys = None if known is None else known.keys
    if result is None:
        return _Found(line, keys)
    about = result.provenance
    said = {"recipe": about.get("recipe"), "seed": about.get("train_seed")} | line
    return _Found({**said, **_asked(result), "file": str(file)}, keys, about.get("question"), _shares(result))


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


def _told_apart(runs: Sequence[_Keys]) -> list[str]:
    """The keys that decide weights in which runs differ, of those that a recipe gives; the seed has a column anyway.

    A default that nobody gave follows from what is named, which has a column where runs differ in it.
    """
    given = {key for one in runs for key in one.given} - {"seed"}
    first = runs[0].full if runs else {}
    return sorted(key for key in given if any(_value(one.full, key) != _value(first, key) for one in runs))


def _value(keys: Mapping[str, Any], key: str) -> tuple[bool, Any]:
    """That of a key, and whether there is such a thing at all."""
    return key in keys, keys.get(key)


def _cell(value: Any) -> Any:
    """Numbers are written alike: 6 of one recipe and 6.0 of another are one group."""
    if value is None:
        return NULL
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return json_text(value) if isinstance(value, list | dict) else value
