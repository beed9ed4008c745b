"""Surfaces over two directions, of weights or of inputs, side by side and at one scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatrock.diagnostics.surface import Array, Landscape
from flatrock.reports.landscape import caption, check_alike, highest, labels
from flatrock.reports.style import SURFACE, blank, finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = 15
# At most as many steps between labels as fit beside each other, however wide the panel is.
TICKS = 5
# Surfaces that rise less than this are flat: rounding, not a shape.
FLAT = 1e-12


def draw_surfaces(records: Sequence[Landscape], path: Path) -> Path:
    """Relative surfaces |g(a, b) - g(0, 0)| of weight landscapes: in relief above, as contours below."""
    check_alike(records)
    shown = [(name, record, k) for name, record in zip(labels(records), records, strict=True) for k in _few(record)]
    top = _top([np.abs(record.rise) for record in records])
    figure = blank(max(3.3 * len(shown) + 1.2, 5.2), 6.9)
    grid = figure.add_gridspec(2, len(shown))
    for column, (name, record, k) in enumerate(shown):
        rise = np.abs(record.rise[k])
        title = name if record.count == 1 else f"{name}, pair {k + 1}"
        _relief(figure, grid[0, column], record.axis, rise, top, f"{title}\nloss {record.middle:.3f} in the middle")
        axes = figure.add_subplot(grid[1, column])
        drawn = _contours(axes, record.axis, rise, top)
        axes.set_xlabel("second direction, filter norms", fontsize=9)
        if column == 0:
            axes.set_ylabel("first direction, filter norms", fontsize=9)
    _scale(figure, drawn, top, "|loss - loss in the middle|, nats", shrink=0.6)
    return finish(figure, caption(records), path)


def _top(surfaces: Sequence[Array]) -> float:
    """The upper end of the scale; 1 where nothing rises, or nothing is finite, so that there is a scale at all."""
    top = highest(surfaces)
    return top if top > FLAT else 1.0


def _few(record: Landscape) -> range:
    return range(min(record.count, 3))


def draw_inputs(records: Sequence[Landscape], path: Path) -> Path:
    """Loss of each image (a row) in each network (a column); a white line is where the answer turns wrong."""
    check_alike(records)
    samples = records[0].samples
    top = _top([record.loss for record in records])
    figure = blank(max(3.0 * len(records) + 1.4, 5.2), 2.9 * len(samples) + 0.9)
    grid = figure.subplots(len(samples), len(records), squeeze=False, sharex=True, sharey=True)
    for column, (name, record) in enumerate(zip(labels(records), records, strict=True)):
        for row, sample in enumerate(samples):
            axes = grid[row][column]
            drawn = _contours(axes, record.axis, record.loss[row], top)
            if 0 < record.values["accuracy"][row].mean() < 1:
                margin = record.values["margin"][row]
                axes.contour(record.axis, record.axis, margin, levels=[0.0], colors="white", linewidths=1.4)
            title = f"image {sample['id']}, class {sample['class']}"
            axes.set_title(f"{name}\n{title}" if row == 0 else title, fontsize=9, loc="left")
            if column == 0:
                axes.set_ylabel("a, along sign(gradient)", fontsize=9)
        grid[-1][column].set_xlabel("b, along random signs", fontsize=9)
    _scale(figure, drawn, top, "cross-entropy, nats", shrink=min(1.0, 1.6 / len(samples)))
    text = "x + a sign(gradient) + b R, R random signs; pixel units of [0, 1]; white: the answer turns wrong. "
    return finish(figure, text + caption(records), path)


def _relief(figure: Figure, place: Any, axis: Sequence[float], surface: Array, top: float, title: str) -> None:
    axes: Any = figure.add_subplot(place, projection="3d")
    b, a = np.meshgrid(axis, axis)
    axes.plot_surface(b, a, surface, cmap=SURFACE, norm=_norm(top), rcount=60, ccount=60, linewidth=0)
    axes.set_zlim(0, top)
    axes.set_title(title, fontsize=9, y=1.01)
    axes.tick_params(labelsize=7, pad=-2)
    for side in "xy":
        axes.locator_params(axis=side, nbins=TICKS)
    axes.view_init(elev=28, azim=-60)
    axes.set_box_aspect((1, 1, 0.75), zoom=1.1)


def _norm(top: float) -> Any:
    """Colours by the square root of the value: a bowl, which is what most surfaces are, then shows its bottom, too."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=top)


def _contours(axes: Any, axis: Sequence[float], surface: Array, top: float) -> Any:
    levels = top * np.linspace(0, 1, LEVELS + 1) ** 2
    drawn = axes.contourf(axis, axis, surface, levels=levels, cmap=SURFACE, norm=_norm(top))
    if float(np.nanmax(surface, initial=0.0)) > levels[1]:
        axes.contour(axis, axis, surface, levels=levels[1:-1], colors="black", linewidths=0.3, alpha=0.5)
    if not np.isfinite(surface).any():
        axes.text(0.5, 0.6, "no finite value", transform=axes.transAxes, ha="center", fontsize=9)
    axes.plot(0, 0, "+", color="white", markersize=7)
    axes.set_aspect("equal")
    axes.tick_params(labelsize=8)
    axes.locator_params(nbins=TICKS)
    return drawn


def _scale(figure: Figure, drawn: Any, top: float, label: str, *, shrink: float) -> None:
    """One colour bar for all surfaces."""
    ticks = top * np.linspace(0, 1, 6) ** 2
    bar = figure.colorbar(drawn, ax=figure.axes, shrink=shrink, ticks=ticks, format="%.2g")
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8)
