"""Learning curves as a PNG."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatrock.core.errors import StateError
from flatrock.core.files import write_atomic
from flatrock.core.records import EpochRecord, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette: told apart by colour-blind readers and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def learning_curves(runs: Mapping[str, Run], path: Path) -> Path:
    """Loss, accuracies on the selection data and the robust generalization gap of each run, epoch by epoch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window system, no global state
    from matplotlib.figure import Figure

    if not any(run.records for run in runs.values()):
        raise StateError("there is nothing to draw: no run has a finished epoch")
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
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
    _dress(loss, "training loss", "loss")
    _dress(accuracy, f"{where} accuracy", "percent")
    _dress(gap, f"robust generalization gap (train - {where})", "points")
    gap.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    accuracy.set_ylim(-1, 102)
    for label, mark in (("clean", "--"), ("robust", "-"), ("best epoch", "o")):
        accuracy.plot([], [], mark, color="0.3", label=label)
    accuracy.legend(frameon=False, fontsize=9)
    loss.legend(frameon=False, fontsize=9)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write_atomic(path, content.getvalue())
    return path


def _points(records: tuple[EpochRecord, ...], name: str, scale: float) -> list[tuple[int, float]]:
    return [(r.epoch, scale * getattr(r, name)) for r in records if getattr(r, name) is not None]


def _line(axes: Axes, points: list[tuple[int, float]], **style: Any) -> None:
    axes.plot([p[0] for p in points], [p[1] for p in points], **style)


def _dress(axes: Axes, title: str, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("epoch", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
