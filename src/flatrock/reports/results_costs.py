"""What rows took, as a table: seconds of an epoch, minutes, memory."""

from __future__ import annotations

from collections.abc import Sequence

from flatrock.core.rows import Row, Score
from flatrock.reports.table import Table, percent


def costs(rows: Sequence[Row], names: Sequence[str]) -> Table:
    """Held-out robust accuracy of the best and the last epoch, and what the run of this name cost."""
    lines = []
    for name, row in zip(names, rows, strict=True):
        ends = [row.selection.get(f"average_{end}", row.selection.get(end)) for end in ("best", "last")]
        star = "*" if row.selection.get("data") == "test" else ""
        said = ["" if end is None else f"{percent(end['robust'])}{star} ({end['epoch']})" for end in ends]
        main = row.scores[row.main] if row.main else None
        memory, elapsed = row.training.get("peak_memory_bytes"), row.training.get("elapsed")
        lines.append(
            (
                name,
                *said,
                epoch_time(row),
                _time(row, f"{row.training['seconds'] / 60:.1f}"),
                _time(row, "" if elapsed is None else f"{elapsed / 60:.1f}"),
                "not recorded" if memory is None else f"{memory / 2**30:.2f}",
                "" if main is None else _minutes(main),
            )
        )
    header = (
        "held-out robust, best (epoch)",
        "last (epoch)",
        "s/epoch",
        "training, min",
        "in all, min",
        "peak memory, GiB",
    )
    return Table(("method", *header, "evaluation, min"), tuple(lines))


def epoch_time(row: Row) -> str:
    """Seconds of an epoch, in the median."""
    seconds = row.training["seconds_per_epoch"]
    return _time(row, "" if seconds is None else f"{seconds:.2f}", median=True)


def _minutes(main: Score) -> str:
    """Of the evaluation and further ones; in brackets if others had the GPU open."""
    told = f"{sum(s for one in (main, *main.more) for s in one.seconds.values()) / 60:.1f}"
    return f"({told})" if main.evaluated_beside else told


def _time(row: Row, told: str, *, median: bool = False) -> str:
    """A time of training; in brackets if the GPU was not the run's own, for a median in half of its epochs or more."""
    shared, watched = (row.training.get(key, 0) for key in ("shared_epochs", "watched_epochs"))
    return f"({told})" if told and shared and (not median or 2 * shared >= watched) else told
