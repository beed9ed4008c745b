"""Words of a command -> names of recipes: by name, by file, by pattern, or all rows of a published table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

from flatrock.core.errors import FlatrockError
from flatrock.core.registry import unknown
from flatrock.recipes.build import extra_fault
from flatrock.recipes.further import surrogates
from flatrock.recipes.load import library, load_recipe, recipe_names
from flatrock.recipes.pieces import DEFAULT_RUNS
from flatrock.recipes.schema import Recipe
from flatrock.recipes.source import sources

Overrides = Iterable[str] | Mapping[str, Any]
# The recipes of each published table, by its name.
Tables = Mapping[str, Sequence[str]]


def found(words: Iterable[str], tables: Tables, faults: dict[str, list[str]]) -> list[str]:
    """The recipes meant, each once; words that mean none are faults."""
    known = recipe_names()
    names: dict[str, None] = {}
    for word in words:
        if _is_recipe(word):
            chosen: Sequence[str] = [word]
        else:
            chosen = tables.get(word) or [name for name in known if fnmatchcase(name, word)]
        if not chosen:
            faults[unknown("recipe, pattern or table", word, [*known, *tables]) + "; see `flatrock ls recipes`"] = []
        names |= dict.fromkeys(chosen)
    if not names and not faults:
        faults["no recipe is named; see `flatrock ls recipes`"] = []
    return list(names)


def whole_tables(words: Iterable[str], tables: Tables, overrides: Overrides) -> tuple[Tables, dict[str, str]]:
    """The tables with, of those named, the recipes that rows are built on; and rows left out with what they lack.

    A row that needs images which are the user's to bring, and are not there, is left out unless it is named itself:
    the others of its table need not wait for them.
    """
    words, overrides = list(words), overrides if isinstance(overrides, Mapping) else list(overrides)
    load = cache(partial(_loaded, overrides=overrides))
    whole, lacking = dict(tables), dict[str, str]()
    for table in (word for word in words if word in tables and not _is_recipe(word)):
        absent = {name: extra_fault(recipe) for name in tables[table] if (recipe := load(name)) is not None}
        lacking |= {name: fault for name, fault in absent.items() if fault and name not in words}
        rows = [name for name in tables[table] if name not in lacking]
        whole[table] = list(dict.fromkeys(need for name in rows for need in _with_needs(name, load)))
    return whole, lacking


def _is_recipe(word: str) -> bool:
    return word in library() or Path(word).suffix in (".yaml", ".yml")


def _loaded(name: str, overrides: Overrides) -> Recipe | None:
    """None if it has faults, which are told when it is planned."""
    try:
        return load_recipe(name, overrides)
    except FlatrockError:
        return None


def _with_needs(name: str, load: Callable[[str], Recipe | None], seen: tuple[str, ...] = ()) -> Iterator[str]:
    """The recipes of the library whose usual runs one is built on, or attacked from, and itself."""
    recipe = load(name)
    for place in (sources(recipe) | surrogates(recipe)).values() if recipe is not None else ():
        usual = place.parent == DEFAULT_RUNS and place.name in recipe_names()
        if usual and place.name not in (*seen, name):
            yield from _with_needs(place.name, load, (*seen, name))
    yield name
