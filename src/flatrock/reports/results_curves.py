"""Robust overfitting as a picture: accuracy under attack epoch by epoch, of the runs of one protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path

from flatrock.core.rows import Row
from flatrock.reports.papers import Protocol
from flatrock.reports.style import blank, dress, finish, legend, line_style


def draw_curves(rows: Sequence[Row], protocol: Protocol, path: Path) -> Path | None:
    """Draw the runs a paper prints best and last epoch for, those that may be compared; None without any."""
    named = {name: entry.label for name, entry in protocol.rows.items() if entry.drops}
    usable = [row for row in rows if (row.comparable or row.on_test) and "curve" in row.selection]
    runs = [row for name in named for row in usable if row.recipe == name]
    if not runs:
        return None
    figure = blank(7.5, 4)
    axes = figure.subplots()
    for i, row in enumerate(runs):
        style, curve = line_style(i), row.selection["curve"]
        x, held, seen = (curve[key] for key in ("epoch", "robust", "train_robust"))
        axes.plot(x, _percent(held), linewidth=1.6, **style)
        axes.plot(x, _percent(seen), linewidth=1, alpha=0.5, **style)
        for end, mark in (("best", "o"), ("last", "s")):
            probe = row.selection[end]
            axes.plot(probe["epoch"], _percent([probe["robust"]]), mark, color=style["color"], markersize=5)
        axes.plot([], [], label=_label(row, named), **style)
    where = {str(row.selection["data"]).replace("_", "-") for row in runs}
    for label, mark in (("best epoch", "o"), ("last epoch", "s")):
        axes.plot([], [], mark, color="0.3", label=label, markersize=5)
    legend(axes)
    dress(axes, "accuracy under the recipe's selection attack", "epoch", "percent", whole_x=True)
    return finish(figure, f"Strong: {' or '.join(sorted(where))} images; pale: images trained on.", path)


def _label(row: Row, named: Mapping[str, str]) -> str:
    return named[row.recipe] + ("*" if row.on_test else "") + (f", seed {row.seed}" if row.seed else "")


def _percent(shares: Sequence[float | None]) -> list[float]:
    """A gap in the line where nothing was measured."""
    return [nan if share is None else 100 * share for share in shares]
