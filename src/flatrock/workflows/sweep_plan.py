"""Keys with several values -> the runs of a sweep: every combination, for every seed. Every fault is told at once."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatrock.core.errors import FlatrockError, is_plain, shown
from flatrock.core.files import brief, json_text, sha256
from flatrock.recipes.changed import in_a_word
from flatrock.recipes.filled import same_training
from flatrock.recipes.load import load_recipe, load_seeds
from flatrock.recipes.overlay import dotted, pairs_of
from flatrock.recipes.pieces import DEFAULT_RUNS
from flatrock.recipes.schema import Recipe
from flatrock.recipes.source import sources
from flatrock.workflows.cost import known_samples
from flatrock.workflows.reproduce_plan import Planned, checked_rows, nothing_begun

# The longest part of a folder's name that says what a setting is.
NAME = 100


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A combination of values, as people write them by key, and its runs, one for each seed."""

    values: Mapping[str, str]
    runs: tuple[Planned, ...]

    @property
    def name(self) -> str:
        """`optimizer.lr=0.1 threat.eps=8/255`."""
        return told(self.values)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A sweep that can be made: of which recipe, and its settings in the order of their words."""

    recipe: str
    settings: tuple[Setting, ...]
    runs_dir: Path

    @property
    def runs(self) -> list[Planned]:
        """Every run, setting by setting."""
        return [run for setting in self.settings for run in setting.runs]


def grid_of(words: Iterable[str], faults: list[str]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """`key=v1,v2` are the values of a grid, `key=v` is an override of all; what is wrong is added to the faults."""
    grid: dict[str, list[Any]] = {}
    overrides: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        parts = _parted(text)
        pairs, wrong = pairs_of([f"{key}={part}" for part in parts] if sign else [word])
        if not wrong and not all(parts) and len(parts) > 1:
            wrong = [f"{word!r} has a value that is empty; values are written key=v1,v2, lists [1,2],[3,4]"]
        if not wrong and pairs[0][0] in (*grid, *overrides):
            wrong = [f"{pairs[0][0]} is given twice; write all of its values behind one key=, with commas"]
        faults += wrong
        for name, value in pairs if not wrong else ():
            if len(parts) > 1:
                grid.setdefault(name, []).append(value)
            else:
                overrides[name] = value
    return grid, overrides


def _parted(text: str) -> list[str]:
    """Split at commas that are in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            depth += (sign in "[{") - (sign in "]}")
        if sign == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def plan_sweep(
    source: str | Path,
    grid: Mapping[str, Sequence[Any]],
    overrides: Mapping[str, Any],
    *,
    seeds: Sequence[int] = (),
    runs_dir: Path | None = None,
    data_dir: Path | None = None,
    download: bool = False,
    known: Sequence[str] = (),
) -> Plan:
    """Every combination of the grid for every seed, in folders named after it; ConfigError lists what is wrong with
    any of them, and faults that are `known`. Nothing is written."""
    grid = {dotted(key): values for key, values in grid.items()}
    odd = _grid_faults(grid, overrides, seeds, known)
    faults: dict[str, list[str]] = {fault: [] for fault in (*known, *odd.values())}
    whole = not faults
    loaded = _loaded(source, {k: v for k, v in grid.items() if k not in odd}, overrides, seeds, faults)
    if not whole:  # what is left of the sweep is not the one that is meant: its folders are not looked at
        raise nothing_begun(faults)
    faults |= _same_weights(loaded)
    where = runs_dir or DEFAULT_RUNS / (f"{loaded[0][0][0].name}-sweep" if loaded else "sweep")
    rows = [_planned(recipe, values, where) for recipes, values in loaded for recipe in recipes]
    rows = checked_rows(
        rows, faults, runs_dir=where, data_dir=data_dir, download=download, option="--runs-dir", alone=True
    )
    by_folder = {row.folder: row for row in rows}
    settings = [
        Setting(values=values, runs=tuple(by_folder[_planned(recipe, values, where).folder] for recipe in recipes))
        for recipes, values in loaded
    ]
    return Plan(recipe=rows[0].recipe.name, settings=tuple(settings), runs_dir=where)


# The recipes of a setting, one for each seed, and its values.
_Loaded = tuple[list[Recipe], dict[str, str]]


def _loaded(
    source: str | Path,
    grid: Mapping[str, Sequence[Any]],
    overrides: Mapping[str, Any],
    seeds: Sequence[int],
    faults: dict[str, list[str]],
) -> list[_Loaded]:
    """Every combination that is a recipe; what is wrong with the others is added to the faults, with their names."""
    found: list[_Loaded] = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        words = {key: in_a_word(value) for key, value in chosen.items()}
        try:
            found.append((_recipes(source, {**overrides, **chosen}, seeds), words))
        except FlatrockError as error:
            for fault in getattr(error, "faults", ()) or (str(error),):
                faults.setdefault(fault, []).append(told(words))
    return found


def _planned(recipe: Recipe, values: Mapping[str, str], where: Path) -> Planned:
    older = where / _folder(recipe.name, values, recipe.seed, values.get)
    folder = where / _folder(recipe.name, values, recipe.seed, lambda key: _readable(values[key]))
    return Planned(recipe=recipe, folder=older if older.exists() else folder)  # a sweep that was begun so goes on there


def _grid_faults(
    grid: Mapping[str, Sequence[Any]], overrides: Mapping[str, Any], seeds: Sequence[int], known: Sequence[str]
) -> dict[str, str]:
    """What is wrong with the keys that have several values; without a key, that there is nothing to sweep."""
    faults = {}
    for key, values in grid.items():
        if key == "seed":
            faults[key] = (
                "seed: seeds are given with --seeds 0,1,2 (in Python: seeds=[0, 1, 2]), which are not settings"
            )
        elif isinstance(values, str | Mapping) or not isinstance(values, Sequence) or not values:
            faults[key] = f"{key}: a grid has a list of values for each key, got {shown(values)}"
        elif odd := [value for value in values if not is_plain(value)]:
            faults[key] = f"{key}: got {shown(odd[0])}; values are those that a recipe file can hold"
        elif key in {dotted(name) for name in overrides}:
            faults[key] = f"{key} is both in the grid and an override; leave one out"
        elif len(set(map(in_a_word, values))) < len(values):
            faults[key] = f"{key} has a value twice, got {', '.join(map(in_a_word, values))}; leave one out"
    if not (faults or known) and len(seeds) < 2 and all(len(values) < 2 for values in grid.values()):
        faults[""] = (
            "nothing is swept: give a key several values, such as optimizer.lr=0.05,0.1, or --seeds 0-2; one run is "
            "made by `flatrock train`"
        )
    return faults


def _recipes(source: str | Path, overrides: Mapping[str, Any], seeds: Sequence[int]) -> list[Recipe]:
    """The recipe of a setting for each seed."""
    if not seeds:
        recipes = [load_recipe(source, overrides)]
    else:
        recipes = list(load_seeds(source, overrides, seeds).values())
    known_samples(recipes[0])  # as many of every seed; too few are a fault
    return recipes


def _same_weights(settings: Sequence[_Loaded]) -> dict[str, list[str]]:
    """Settings that differ in nothing that decides weights would be trained several times for nothing."""
    alike: dict[str, list[dict[str, str]]] = {}
    for recipes, values in settings:
        known = [same_training(recipes[0]), *(str(place) for place in sources(recipes[0]).values())]
        alike.setdefault(json_text(known), []).append(values)
    found = {}
    for same in (group for group in alike.values() if len(group) > 1):
        keys = [key for key in same[0] if len({values[key] for values in same}) > 1]
        cure = "name all attacks in one list" if keys == ["evaluate.attacks"] else "give one value"
        fault = f"the same weights would be trained {len(same)} times: {', '.join(keys)} decides none here; {cure}"
        found[fault] = list(map(told, same))
    return found


def told(values: Mapping[str, str]) -> str:
    """A setting in words."""
    return " ".join(f"{key}={value}" for key, value in values.items()) or "as it is"


def _folder(name: str, values: Mapping[str, str], seed: int, part: Callable[[str], object]) -> str:
    """Named after what differs, in whatever order it was said; what a name cannot say whole leaves a digest there."""
    said = "-".join(f"{key}={values[key]}" for key in sorted(values)) or name
    slashed = said.replace("/", "_")  # 8_255 says enough
    parts = "-".join(f"{key}={part(key)}" for key in sorted(values)) or name
    safe = re.sub(r"[^\w.=+-]+", "_", parts.replace("/", "_"))
    safe = brief(safe, NAME) if safe == slashed else f"{safe[: NAME - 9]}-{sha256(said)[:8]}"
    return f"{safe}-seed{seed}"


def _readable(word: str) -> str:
    """A value for a folder's name: [50, 75] is 50+75, [{name: awp, gamma: 0.01}] is awp_gamma=0.01."""
    import yaml

    def said(value: Any) -> str:
        if isinstance(value, Mapping):
            options = [f"{key}={said(one)}" for key, one in value.items() if key != "name"]
            return "_".join([*([said(value["name"])] if "name" in value else []), *options])
        return ("+".join(map(said, value)) or "none") if isinstance(value, list) else in_a_word(value)

    return said(yaml.safe_load(word)) if word.startswith(("[", "{")) else word
