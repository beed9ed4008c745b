"""What rows of results are called, so that no two are called the same."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType

from flatrock.core.files import brief
from flatrock.core.rows import Row
from flatrock.reports.style import radius
from flatrock.reports.table import named

# Characters of a value that tells rows apart: a number of more is written as a fraction, a text of many more is cut.
SHORT, LONG = 8, 40
NOWHERE: Mapping[Hashable, str] = MappingProxyType({})


def row_names(rows: Sequence[Row], folders: Mapping[Hashable, str] = NOWHERE) -> list[str]:
    """Recipes, with the seed if there are several, what is not as it should be, and what tells changed rows apart.

    Recipes of one's own have no changes: those of one name are told apart by their folders, by the keys of their rows,
    or by their hashes.
    """
    several = len({row.seed for row in rows}) > 1
    names = [
        row.recipe
        + (f", seed {row.seed}" if several else "")
        + (", select=test" if row.on_test else f", changed{_apart(row, rows)}" if row.changes else "")
        for row in rows
    ]
    called = []
    for name, row in zip(names, rows, strict=True):
        place = f" ({folders.get(row.key) or row.recipe_hash[:8]})" if names.count(name) > 1 else ""
        known = named(name + place, collapsed=row.collapsed)
        called.append(known if row.status == "finished" else f"{known} {row.status.upper()}")
    return called


def method_names(rows: Sequence[Row], labels: Mapping[str, str]) -> list[str]:
    """What tables with a column for the seed call rows: by the label of their recipe, with a `*` if chosen on the test
    set, and with what tells settings of one recipe and seed apart."""
    plain = [(labels.get(row.recipe, row.recipe) + "*" * row.on_test, row.seed) for row in rows]
    names = [
        name + (f", changed{_apart(row, rows)}" if plain.count((name, seed)) > 1 and row.changes else "")
        for (name, seed), row in zip(plain, rows, strict=True)
    ]
    keys = [(name, row.seed) for name, row in zip(names, rows, strict=True)]
    return [
        f"{name} ({row.recipe_hash[:8]})" if keys.count((name, row.seed)) > 1 else name
        for name, row in zip(names, rows, strict=True)
    ]


def _apart(row: Row, rows: Sequence[Row]) -> str:
    """`: threat.eps=4/255` where other changed rows of the recipe have another one; nothing where they are changed
    alike, or there are none."""
    changed = [other for other in rows if other.recipe == row.recipe and other.changes and not other.on_test]
    alike = [_changes(other) for other in changed]
    known = {key: theirs for changes in alike for key, (_, theirs) in changes.items()}
    own = {key: ours for key, (ours, _) in _changes(row).items()}
    keys = [key for key in sorted(known) if any(changes.get(key) != alike[0].get(key) for changes in alike)]
    told = ", ".join(f"{key}={_value(own.get(key, known[key]))}" for key in keys)
    return f": {told}" if told else ""


def _changes(row: Row) -> dict[str, tuple[str, str]]:
    """What a row has and what the library's recipe has, by key: rows say `key: this instead of that`."""
    parts = (change.partition(": ") for change in row.changes)
    both = {key: text.rpartition(" instead of ") for key, _, text in parts}
    return {key: (ours, theirs) for key, (ours, _, theirs) in both.items()}


def _value(text: str) -> str:
    try:
        return text if len(text) <= SHORT else radius(float(text))
    except ValueError:
        return brief(text, LONG)
