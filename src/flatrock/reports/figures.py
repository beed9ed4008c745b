"""Learning curves as a PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatrock.core.errors import StateError
from flatrock.core.runs import EpochRecord, Run
from flatrock.reports.style import blank, colours, dress, legend, store

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALE = 0.35


def learning_curves(runs: Mapping[str, Run], path: Path | str) -> Path:
    """Loss, accuracies on the selection data and the robust generalization gap of each run, epoch by epoch.

    Runs whose epochs were chosen on other data (held out, or the test set) have panels of their own, with that name.
    Of a run that averages, the accuracies are those of averaged weights, which will be evaluated; those of the weights
    as trained are drawn pale, and the gap is theirs.
    """
    kinds = list(dict.fromkeys(where for run in runs.values() if (where := _where(run))))
    if not kinds:
        raise StateError("there is nothing to draw: no run has a finished epoch")
    coloured = dict(zip(runs, colours(len(runs)), strict=False))
    figure = blank(12, 3.8 * len(kinds))
    rows = figure.subplots(len(kinds), 3, squeeze=False)
    for kind, axes in zip(kinds, rows, strict=True):
        # A run that has not finished an epoch stands in the first legend.
        own = {name: run for name, run in runs.items() if (_where(run) or kinds[0]) == kind}
        _row(own, coloured, kind, *axes)
    legend(*rows[:, 0])
    return store(figure, path)


def _where(run: Run) -> str:
    """The data its epochs are chosen on; nothing as long as there is none."""
    return run.records[0].selected_on.replace("_", "-") if run.records else ""


def _row(
    runs: Mapping[str, Run], coloured: Mapping[str, str], where: str, loss: Axes, accuracy: Axes, gap: Axes
) -> None:
    """The panels of runs whose epochs were chosen on the same data."""
    for name, run in runs.items():
        _draw(name, run, coloured[name], loss, accuracy, gap)
    dress(loss, "training loss", "epoch", "loss", whole_x=True)
    dress(accuracy, f"{where} accuracy", "epoch", "percent", whole_x=True)
    before = ", before averaging" if any(map(_averages, runs.values())) else ""
    dress(gap, f"robust gap, train - {where}{before}", "epoch", "points", whole_x=True)
    gap.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    accuracy.set_ylim(-1, 102)
    for label, mark in (("clean", "--"), ("robust", "-"), ("best epoch", "o")):
        accuracy.plot([], [], mark, color="0.3", label=label)
    if before:
        accuracy.plot([], [], "-", color="0.3", alpha=PALE, label="before averaging")
    accuracy.legend(frameon=False, fontsize=9)


def _draw(name: str, run: Run, colour: str, loss: Axes, accuracy: Axes, gap: Axes) -> None:
    style: dict[str, Any] = {"color": colour, "linewidth": 1.6}
    _line(loss, [(r.epoch, r.terms["total"]) for r in run.records], label=name, **style)
    prefix = "average_" if _averages(run) else ""
    if prefix:
        _accuracies(accuracy, run.records, "", **style, alpha=PALE)
    _accuracies(accuracy, run.records, prefix, **style)
    best = run.best_average if prefix else run.best
    if best is not None:
        _line(accuracy, _points((best,), f"{prefix}robust"), marker="o", markersize=5, **style)
    _line(gap, _points(run.records, "gap"), **style)


def _averages(run: Run) -> bool:
    return any(r.average_robust is not None for r in run.records)


def _accuracies(axes: Axes, records: tuple[EpochRecord, ...], prefix: str, **style: Any) -> None:
    _line(axes, _points(records, f"{prefix}clean"), linestyle="--", **style)
    _line(axes, _points(records, f"{prefix}robust"), **style)


def _points(records: tuple[EpochRecord, ...], name: str) -> list[tuple[int, float]]:
    return [(r.epoch, 100 * getattr(r, name)) for r in records if getattr(r, name) is not None]


def _line(axes: Axes, points: list[tuple[int, float]], **style: Any) -> None:
    axes.plot([p[0] for p in points], [p[1] for p in points], **style)
