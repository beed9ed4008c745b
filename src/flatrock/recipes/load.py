"""Find a recipe by name or path, merge its base and the overrides, validate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flatrock.core.bands import bands_text
from flatrock.core.errors import ConfigError
from flatrock.core.registry import unknown
from flatrock.recipes.changed import tell_changes
from flatrock.recipes.check import validate
from flatrock.recipes.draft import Draft
from flatrock.recipes.overlay import lay_over, overlay, pairs_of, spelled_out
from flatrock.recipes.read import read_yaml
from flatrock.recipes.resumed import is_run, recipe_file, recipe_there
from flatrock.recipes.schema import Recipe

LIBRARY = Path(__file__).parent / "library"
# What a recipe says about its numbers, and how it ends in a copy.
EXPECTED = ("bands", "expect")
COPIED = re.compile(r" \(of (\w+)\)$")
# A file here holds the rows of one published table: under `rows`, each recipe says how it differs from the rest of it.
TABLES = LIBRARY / "tables"


@cache
def library() -> dict[str, Path]:
    """The recipes that come with flatrock and the files they are in; names beginning with '_' are bases for others."""
    found = {p.stem: p for p in sorted(LIBRARY.rglob("*.yaml")) if p.parent != TABLES}
    return found | {row: p for p in sorted(TABLES.glob("*.yaml")) for row in _read(p)["rows"]}


def recipe_names() -> list[str]:
    """Names a user can train."""
    return [n for n in library() if not n.startswith("_")]


def summaries() -> dict[str, str]:
    """What each of them is, in a line, and where it was measured what is expected of it, in percent.

    They are not checked here: building what all of them name takes seconds.
    """
    abouts = {name: _merged(library()[name], name, ())["about"] for name in recipe_names()}
    return {
        name: about["summary"] + (f"; expect {bands_text(about['bands'])}" if about.get("bands") else "")
        for name, about in abouts.items()
    }


def load_recipe(
    source: str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    also: Callable[[Draft], list[str]] | None = None,
    resume: bool = False,
) -> Recipe:
    """The recipe called `source` (a name of the library or a file), with overrides such as 'train.epochs=3'.

    With `resume` it may be the folder of a run, too, and is the recipe stored there.
    Every fault of it and of the overrides is told at once, and where there are any those that `also` finds, too. What
    was expected of a recipe is not expected of one whose numbers overrides change, and its summary names them;
    nor are its further evaluations asked of one under another threat or on other data.
    """
    if not isinstance(source, str | Path):
        raise ConfigError(f"a recipe is named by text or a path, got {type(source).__name__}; write it to a YAML file")
    path = _find(source, resume=resume)
    name = path.stem if path == Path(source) else str(source)
    raw = recipe_there(path, _read) if _names_run(source) else _merged(path, name, ())
    raw.setdefault("name", name)
    given = deepcopy(raw)
    pairs, faults = pairs_of(overrides)
    faults += lay_over(raw, pairs)
    _drop_bands(raw, given)
    _drop_further(raw, given)
    tell_changes(raw, given)
    return _of_itself(validate(raw, f"recipe {source}", known=faults, also=also))


def load_seeds(
    source: str | Path, overrides: Iterable[str] | Mapping[str, Any], seeds: Iterable[int]
) -> dict[int, Recipe]:
    """The recipe once for every seed."""
    if _names_run(source):
        raise ConfigError(f"{source} is one run, but --seeds begins one for each seed; leave it out, or name a recipe")
    overrides = overrides if isinstance(overrides, Mapping) else list(overrides)
    found, faults = pairs_of(overrides)
    if faults:
        load_recipe(source, overrides)  # raises, with all that is wrong
    pairs = dict(found)
    if "seed" in pairs:
        raise ConfigError(f"seed={pairs['seed']} and --seeds exclude each other; choose one")
    return {seed: load_recipe(source, {**pairs, "seed": seed}) for seed in seeds}


def place_of(source: object, folder: str | Path | None, *, resume: bool) -> Path | None:
    """The folder asked for; a run that is resumed by its folder stays in it."""
    asked = None if folder is None else Path(folder)
    if not (resume and _names_run(source)):
        return asked
    place = Path(str(source))
    if asked is not None and asked.resolve() != place.resolve():
        raise ConfigError(
            f"run {place} goes on where it is, but the run folder asked for is {asked}; leave out --run-dir "
            "(in Python: folder)"
        )
    return place


def _names_run(source: object) -> bool:
    """Whether this is the folder of a run, and no name of the library: a name is a recipe whatever lies there."""
    return is_run(source) and str(source) not in library()


def _drop_bands(raw: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Take away what was expected of a recipe as given if this one has other numbers and brings no bands of its own."""
    about, before = raw.get("about"), given.get("about")
    if not isinstance(about, Mapping) or not isinstance(before, Mapping):
        return
    stale = [key for key in EXPECTED if before.get(key) and about.get(key) == before[key]]
    if stale and about.get("bands") == before.get("bands") and _decisive(raw) != _decisive(given):
        raw["about"] = _without(about, *stale)


def _of_itself(recipe: Recipe) -> Recipe:
    """The recipe without what it says of the one it was copied from (`copied`), if it has been edited since."""
    match = COPIED.search(recipe.about.expect)
    if match is None or match[1] not in library():
        return recipe
    if _numbers(recipe) == _numbers(load_recipe(match[1])):
        return recipe
    return recipe.model_copy(update={"about": recipe.about.model_copy(update={"expect": ""})})


def copied(said: str, name: str) -> str:
    """What is expected of a recipe as a copy of it says it."""
    return f"{said} (of {name})"


def _drop_further(raw: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Take away the radii and surrogates of a recipe as given if this one has another threat, or other data, and brings
    no further evaluations of its own."""
    evaluate, before = raw.get("evaluate"), given.get("evaluate")
    if not isinstance(evaluate, Mapping) or not isinstance(before, Mapping) or not before.get("more"):
        return
    now, then = _attacked(raw), _attacked(given)
    if evaluate.get("more") == before["more"] and now and then and now != then:
        raw["evaluate"] = _without(evaluate, "more")


def _attacked(raw: Mapping[str, Any]) -> Any:
    """Threat and data, by values that do not depend on how they are written; None of a recipe that has faults."""
    try:
        recipe = Recipe.model_validate(dict(raw))
    except ValidationError:
        return None
    return recipe.threat, recipe.data.name


def _decisive(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keys that decide the numbers, other than the seed; None of a recipe that has faults."""
    try:
        return _numbers(Recipe.model_validate(dict(raw)))
    except ValidationError:
        return None


def _numbers(recipe: Recipe) -> dict[str, Any]:
    return _without(recipe.judged_keys(), "seed")


def namesake(source: str | Path) -> Path | None:
    """The file that differs from this name by its ending alone: a name stands for a recipe of the library."""
    files = [Path(f"{source}{ending}") for ending in (".yaml", ".yml")]
    return next((file for file in files if file.is_file()), None)


def _find(source: str | Path, *, resume: bool = False) -> Path:
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"there is no recipe file {path}")
        return path
    if _names_run(source):
        return recipe_file(source, resume=resume)
    if str(source) not in library():
        if path.is_dir():
            raise ConfigError(f"{source} is a folder, neither a recipe nor a run: it has no run.json")
        meant = f"; your file is named {file}" if (file := namesake(source)) else ""
        raise ConfigError(unknown("recipe", str(source), recipe_names(), more=" (see `flatrock ls recipes`)") + meant)
    return library()[str(source)]


def _merged(path: Path, name: str, seen: tuple[tuple[Path, str], ...]) -> dict[str, Any]:
    """The file's content laid over its base's; of a table, what its rows share and then the row called `name`.

    A name is not passed on: a run would go where that of the base, or of another row, goes. Nor, to a file of the
    user's, is what a base says about itself: its source, accuracy and time are not those of a recipe that differs. Its
    bands are not passed on at all, nor its further evaluations: they are of one row of a published table, whose radii
    and surrogate are that row's.
    """
    if (path, name) in seen:
        raise ConfigError(f"recipe {path} is its own base: {' -> '.join([n for _, n in seen] + [name])}")
    raw = _read(path)
    if path.parent == TABLES:
        row = {key: spelled_out(key, value) for key, value in raw.pop("rows")[name].items()}
        raw = overlay(_without(raw, "name"), row)
    base = raw.pop("base", None)
    if base is None:
        return raw
    beside = path.parent / f"{base}.yaml"
    parent = beside if beside.is_file() else _find(str(base))
    own = ["name"] if LIBRARY in path.absolute().parents else ["name", "about"]
    below = _without(_merged(parent, str(base), (*seen, (path, name))), *own)
    for section, own_alone in (("about", "bands"), ("evaluate", "more")):
        if isinstance(below.get(section), Mapping):
            below[section] = _without(below[section], own_alone)
    return overlay(below, raw)


def _without(raw: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


def _read(path: Path) -> dict[str, Any]:
    raw = deepcopy(_shipped(path)) if LIBRARY in path.parents else _content(path)
    return {key: spelled_out(key, value) for key, value in raw.items()}


@cache
def _shipped(path: Path) -> dict[str, Any]:
    """A file of the library is the base of many, and stays as it is."""
    return _content(path)


def _content(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror or error}") from error
    raw = read_yaml(content, f"recipe {path}")
    if not isinstance(raw, dict):
        raise ConfigError(f"recipe {path} must be a mapping of sections, got {type(raw).__name__}")
    return raw
