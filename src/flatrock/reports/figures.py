"""Learning curves as a PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatrock.core.errors import StateError
from flatrock.core.records import EpochRecord, Run
from flatrock.reports.style import COLOURS as COLOURS
from flatrock.reports.style import blank, dress, store

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def learning_curves(runs: Mapping[str, Run], path: Path) -> Path:
    """Loss, accuracies on the selection data and the robust generalization gap of each run, epoch by epoch."""
    if not any(run.records for run in runs.values()):
        raise StateError("there is nothing to draw: no run has a finished epoch")
    figure = blank(12, 3.8)
    loss, accuracy, gap = figure.subplots(1, 3)
    for i, (name, run) in enumerate(runs.items()):
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linewidth": 1.6}
        _line(loss, [(r.epoch, r.terms["total"]) for r in run.records], label=name, **style)
        _line(accuracy, _points(run.records, "clean", 100), linestyle="--", **style)
        _line(accuracy, _points(run.records, "robust", 100), **style)
        best = run.best
        if best is not None and best.robust is not None:
            accuracy.plot(best.epoch, 100 * best.robust, "o", color=style["color"], markersize=5)
        _line(gap, _points(run.records, "gap", 100), **style)
    first = next(run.records[0] for run in runs.values() if run.records)
    where = first.selected_on.replace("_", "-")
    dress(loss, "training loss", "epoch", "loss", whole_x=True)
    dress(accuracy, f"{where} accuracy", "epoch", "percent", whole_x=True)
    dress(gap, f"robust generalization gap (train - {where})", "epoch", "points", whole_x=True)
    gap.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    accuracy.set_ylim(-1, 102)
    for label, mark in (("clean", "--"), ("robust", "-"), ("best epoch", "o")):
        accuracy.plot([], [], mark, color="0.3", label=label)
    accuracy.legend(frameon=False, fontsize=9)
    loss.legend(frameon=False, fontsize=9)
    return store(figure, path)


def _points(records: tuple[EpochRecord, ...], name: str, scale: float) -> list[tuple[int, float]]:
    return [(r.epoch, scale * getattr(r, name)) for r in records if getattr(r, name) is not None]


def _line(axes: Axes, points: list[tuple[int, float]], **style: Any) -> None:
    axes.plot([p[0] for p in points], [p[1] for p in points], **style)
