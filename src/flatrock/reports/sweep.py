"""A sweep as a table: a line per setting, mean and standard deviation over its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from flatrock.core.rows import WORST, Row, Score
from flatrock.reports.seeds import spread
from flatrock.reports.table import Table


class Settled(Protocol):
    """What there is of a setting: its values, rows of runs that were evaluated, how many failed, how many there are."""

    @property
    def values(self) -> Mapping[str, str]: ...  # noqa: D102

    @property
    def rows(self) -> Sequence[Row]: ...  # noqa: D102

    @property
    def failed(self) -> Sequence[object]: ...  # noqa: D102

    @property
    def wanted(self) -> int: ...  # noqa: D102


def swept(settings: Sequence[Settled]) -> Table:
    """Test accuracies of the checkpoint each run is known by, in percent: mean ± standard deviation over seeds.

    Further evaluations of recipes have columns of their own, and no part in the worst case. A setting of one seed has
    no deviation, one of averaged and of plain weights no mean. `*`: epochs were chosen on the test set. Seeds that
    failed, or give one answer to everything, are counted beside those whose numbers these are.
    """
    names = dict.fromkeys(name for one in settings for row in one.rows for name in _main(row).verdicts)
    measures = [
        *(["clean"] if names else []),
        *(name for name in names if name != "clean"),
        *([WORST] if names else []),
    ]
    keys = list(settings[0].values) if settings else []
    lines = []
    for one in settings:
        star = "*" if any(_main(row).marks for row in one.rows) else ""
        shares = [[_share(row, name) for row in one.rows] for name in measures]
        cells = [text + star if (text := spread(column)) and not _mixed(one) else "" for column in shares]
        lines.append((*(one.values[key] for key in keys), _seeds(one), *cells))
    return Table((*keys, "seeds", *measures), tuple(lines))


def _main(row: Row) -> Score:
    assert row.main is not None
    return row.scores[row.main]


def _share(row: Row, name: str) -> float | None:
    score = _main(row)
    flags = score.worst if name == WORST else score.verdicts.get(name)
    return None if flags is None else float(flags.double().mean())


def _seeds(one: Settled) -> str:
    """How many seeds the numbers are of, and what became of the others."""
    told = [str(len(one.rows)) if len(one.rows) == one.wanted else f"{len(one.rows)} of {one.wanted}"]
    told += [f"{len(one.failed)} FAILED"] if one.failed else []
    told += [f"{n} COLLAPSED"] if (n := sum(row.collapsed for row in one.rows)) else []
    told += [f"{n} not averaged"] if (n := sum(row.stands_in for row in one.rows)) else []
    return ", ".join(told) + (": no mean" if _mixed(one) else "")


def _mixed(one: Settled) -> bool:
    """Whether some runs are known by averaged weights, and some by plain ones in their place."""
    return len({row.stands_in for row in one.rows}) > 1
