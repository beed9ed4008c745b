"""Models side by side, and how far each is from the first, paired by test sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from flatrock.core.gaps import paired
from flatrock.core.rows import WORST
from flatrock.reports.claims import points
from flatrock.reports.table import Table, percent

# A difference beyond chance: more than two of its standard errors.
BEYOND = " !"


def accuracy_table(models: Mapping[str, Mapping[str, Tensor]]) -> Table:
    """One row per model; its verdicts by name of attack. What a model was not asked is left empty."""
    columns = _columns(list(models.values()))
    shares = [[_share(right.get(name)) for name in columns] for right in models.values()]
    return Table(("model", *columns), tuple((name, *row) for name, row in zip(models, shares, strict=True)))


def difference_table(models: Mapping[str, Mapping[str, Tensor]], leave_out: Sequence[str] = ()) -> Table:
    """Every model minus the first, in points with the standard error of the per-sample differences."""
    (base, first), *others = models.items()
    columns = [name for name in _columns([first]) if name not in leave_out]
    rows = []
    for name, right in others:
        gaps = {c: paired(right[c], first[c]) for c in columns if c in right}
        cells = [points(gaps[c]) + BEYOND * gaps[c].beyond_chance if c in gaps else "" for c in columns]
        rows.append((name, *cells))
    return Table((f"minus {base}", *columns), tuple(rows))


def _columns(rights: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """All names: clean, the attacks in order of appearance, the worst case."""
    names = list(dict.fromkeys(name for right in rights for name in right))
    return sorted(names, key=lambda name: (name == WORST, name != "clean"))


def _share(flags: Tensor | None) -> str:
    return percent(None if flags is None else float(flags.double().mean()))
