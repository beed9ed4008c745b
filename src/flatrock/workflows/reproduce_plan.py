"""Names of recipes -> the rows of a table: what is trained and where, in which order. Every fault is told at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flatrock.core.errors import ConfigError, FlatrockError
from flatrock.core.files import sha256
from flatrock.core.runs import Run
from flatrock.data.catalog import default_folder, how_to_get, info
from flatrock.data.catalog import found as found_data
from flatrock.engine.folder import UNENDED, RunFolder
from flatrock.recipes.build import extra_fault
from flatrock.recipes.further import crafted_on, surrogates
from flatrock.recipes.helper import helper_fault
from flatrock.recipes.load import load_recipe, load_seeds, recipe_names
from flatrock.recipes.pieces import DEFAULT_RUNS
from flatrock.recipes.schema import Recipe
from flatrock.recipes.source import built_on, sources
from flatrock.recipes.start import start_fault
from flatrock.workflows.folders import place_faults
from flatrock.workflows.reproduce_names import Overrides, Tables, found
from flatrock.workflows.results import CHECKPOINTS, is_evaluated, judged, questions_left
from flatrock.workflows.surrogate import surrogate_fault

NEW = "new"
SOURCE_FAULTS = {"objective.helper": helper_fault, "model.weights": start_fault}
# The longest part of a folder's name that says how a recipe was changed.
CHANGES = 80


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A row to be: its recipe, its run folder, the epochs that are evaluated, the folders of rows it needs first."""

    recipe: Recipe
    folder: Path
    ends: tuple[str, ...] = ("best",)
    needs: tuple[Path, ...] = ()

    @property
    def status(self) -> str:
        """That of its run: running, interrupted, finished, truncated or failed; `new` if there is none."""
        folder = RunFolder(self.folder)
        begun = folder.in_use() and not folder.barely_begun()
        return str(folder.read_info()["status"]) if begun else NEW

    def unevaluated(self, run: Run) -> dict[str, list[dict[str, Any]]]:
        """The checkpoints of the run that are to be evaluated, and what is to be asked (options of evaluate_run).

        They are those asked for, and results of older weights, of which the recipe's own plan is made again.
        """
        main = "best" if run.best_average is None else "average-best"
        wanted = [main.replace("best", end) for end in self.ends]
        asked = {name: questions_left(run, name, self.recipe) for name in wanted}
        for name in (name for name in CHECKPOINTS if (run.folder / f"result-{name}.json").is_file()):
            asked.setdefault(name, [] if is_evaluated(run, name, self.recipe) else [{}])
        return {name: left for name, left in asked.items() if left}

    def left(self) -> list[str]:
        """What is to be done: `train`, and the epochs that are not evaluated; nothing of a run that failed."""
        status = self.status
        if status in (NEW, *UNENDED):
            return ["train", *self.ends]
        return [] if status == "failed" else list(self.unevaluated(RunFolder(self.folder).run()))

    def crafted_on(self) -> dict[str, Path]:
        """The surrogates of evaluations that are to be made, by the key that names each."""
        if self.status in (NEW, *UNENDED):
            return surrogates(self.recipe)
        run = RunFolder(self.folder).run()
        wanted = [options.get("surrogate") for left in self.unevaluated(run).values() for options in left]
        return {key: place for key, place in surrogates(self.recipe).items() if str(place) in wanted}


def plan_rows(
    names: Iterable[str],
    overrides: Overrides = (),
    *,
    runs_dir: Path = DEFAULT_RUNS,
    seeds: Sequence[int] = (),
    last: Collection[str] = (),
    data_dir: Path | None = None,
    download: bool = False,
    tables: Tables = MappingProxyType({}),
) -> list[Planned]:
    """The rows named, each after the one it needs; ConfigError lists what is wrong with any of them.

    A name may be one of `tables` and mean all of its recipes. `last` are the recipes whose last epoch is evaluated too.
    Nothing is written.
    """
    faults: dict[str, list[str]] = {}
    rows: list[Planned] = []
    overrides = overrides if isinstance(overrides, Mapping) else list(overrides)
    for name in found(names, tables, faults):
        try:
            recipes = load_seeds(name, overrides, seeds) if seeds else {None: load_recipe(name, overrides)}
        except FlatrockError as error:
            for fault in getattr(error, "faults", ()) or (str(error),):
                faults.setdefault(fault, []).append(name)
            continue
        plain = _plain(name)
        for recipe in recipes.values():
            place = runs_dir / _run_name(recipe, plain, numbered=bool(seeds))
            ends = ("best", "last") if recipe.name in last else ("best",)
            rows.append(Planned(recipe=recipe, folder=place, ends=ends))
    return checked_rows(rows, faults, runs_dir=runs_dir, data_dir=data_dir, download=download)


def checked_rows(
    rows: Sequence[Planned],
    faults: dict[str, list[str]],
    *,
    runs_dir: Path,
    data_dir: Path | None = None,
    download: bool = False,
    option: str = "--runs-dir",
    alone: bool = False,
) -> list[Planned]:
    """The rows, each after the one it needs; ConfigError lists these faults and whatever is wrong with a row.

    `option` is that of the command which says where runs lie; `alone`: it makes no rows that others are built on.
    """
    rows = [_with_sources(row, rows, runs_dir) for row in rows]
    for row in rows:
        for fault in _faults(row, rows, data_dir, download, option, alone=alone):
            faults.setdefault(fault, []).append(row.folder.name)
    if faults:
        raise nothing_begun(faults)
    return _ordered(rows)


def nothing_begun(faults: Mapping[str, Sequence[str]]) -> ConfigError:
    """All faults of rows that were to be made, each once, with the names of those that have it."""
    return ConfigError("nothing was begun:", tuple(_told(*fault) for fault in faults.items()))


def _told(fault: str, names: Sequence[str]) -> str:
    """A fault, once, with the names of all who have it."""
    names = list(dict.fromkeys(names))
    others = f" and {len(names) - 3} others" if len(names) > 4 else f", {names[3]}" if len(names) == 4 else ""
    return f"{', '.join(names[:3])}{others}: {fault}" if names else fault


def _plain(name: str) -> Recipe | None:
    """The recipe without overrides; None if it is none without them."""
    try:
        return load_recipe(name)
    except FlatrockError:
        return None


def _run_name(recipe: Recipe, plain: Recipe | None, *, numbered: bool) -> str:
    """The recipe's name and what was changed in it: a run of another recipe never lies in the same folder."""
    own, known = _named(recipe), {} if plain is None else _named(plain)
    keys = sorted(key for key in own.keys() | known.keys() if key != "seed" and own.get(key) != known.get(key))
    said = "-".join(f"{key}={own.get(key)}" for key in keys)
    safe = re.sub(r"[^\w.=+-]+", "_", said)
    if safe != said or len(said) > CHANGES:
        safe = f"{safe[: CHANGES - 9]}-{sha256(said)[:8]}"
    seed = [f"seed{recipe.seed}"] if numbered or recipe.seed != known.get("seed") else []
    return "-".join([recipe.name, *([safe] if safe else []), *seed])


def _named(recipe: Recipe) -> dict[str, Any]:
    """What decides a row, and where what it is built on lies."""
    return judged(recipe) | {key: str(place) for key, place in sources(recipe).items()}


def _with_sources(row: Planned, rows: Sequence[Planned], runs_dir: Path) -> Planned:
    """Runs that a recipe is built on: those of their name among the rows (of the lowest seed), else beside them."""
    recipe, needs, crafted = row.recipe, [], surrogates(row.recipe)
    for key, said in (sources(recipe) | crafted).items():
        move = crafted_on if key in crafted else built_on
        usual, beside = said.parent == DEFAULT_RUNS, runs_dir / said.name
        others = [other for other in rows if other.folder != row.folder]
        asked = [r for r in others if r.folder == said or (usual and r.recipe.name == said.name)]
        if asked:
            needs.append(min(asked, key=lambda r: r.recipe.seed).folder)
            recipe = move(recipe, key, needs[-1])
        elif usual and beside.exists():
            recipe = move(recipe, key, beside)
    return replace(row, recipe=recipe, needs=tuple(dict.fromkeys(needs)))


def _faults(
    row: Planned, rows: Sequence[Planned], data_dir: Path | None, download: bool, option: str, *, alone: bool
) -> list[str]:
    """What keeps a row from being trained or evaluated, as far as that can be known before."""
    if sum(other.folder == row.folder for other in rows) > 1:
        return [f"two recipes would be trained into {row.folder}; give one of them another name"]
    try:
        faults = place_faults(row.recipe, row.folder, elsewhere=f"choose another place with {option}")
        if faults or not row.left():
            return faults
    except FlatrockError as error:
        return [str(error)]
    return [*_data_faults(row.recipe, data_dir, download), *_source_faults(row, alone=alone)]


def _data_faults(recipe: Recipe, data_dir: Path | None, download: bool) -> list[str]:
    data, faults = recipe.data, []
    if found_data(data.name, data_dir) is None and not (download and info(data.name).remote):
        faults.append(f"{data.name} not found in {data_dir or default_folder()}; {how_to_get(data.name)}")
    return [*faults, *filter(None, [extra_fault(recipe)])]


def _source_faults(row: Planned, *, alone: bool) -> list[str]:
    """What a recipe is built on, or attacked from, must be there, and fit, unless it is among the rows."""
    faults: list[str] = []
    untrained = row.status in (NEW, *UNENDED)
    begun = RunFolder(row.folder).begun()
    built = {k: p for k, p in sources(row.recipe).items() if untrained and not (k == "model.weights" and begun)}
    for key, place in (built | row.crafted_on()).items():
        if place in row.needs:
            continue
        if not place.exists() and place.name in recipe_names():
            cure = (
                f"make it first: flatrock train {place.name}" if alone else f"name {place.name} too, it will come first"
            )
            faults.append(f"{key}: there is no run {place}; {cure}")
        elif fault := SOURCE_FAULTS[key](row.recipe) if key in built else surrogate_fault(row.recipe, key, place):
            faults.append(fault)
    return faults


def _ordered(rows: Sequence[Planned]) -> list[Planned]:
    """In the order given, but what a row needs comes before it."""
    by_folder = {row.folder: row for row in rows}
    done: dict[Path, Planned] = {}

    def place(row: Planned, waiting: frozenset[Path]) -> None:
        for folder in row.needs:
            if folder not in done and folder not in waiting:
                place(by_folder[folder], waiting | {row.folder})
        done[row.folder] = row

    for row in rows:
        if row.folder not in done:
            place(row, frozenset([row.folder]))
    return list(done.values())
