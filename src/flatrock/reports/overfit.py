"""Robust overfitting: accuracy and its generalization gap over training, against how sharp the kept weights lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatrock.diagnostics.overfit import Study, check_selections
from flatrock.reports.landscape import STAR, caption, check_alike, spread
from flatrock.reports.style import blank, dress, finish, legend, line_style, mark_of
from flatrock.reports.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# In two lines: all columns must fit into 80 letters.
HEADER = ("run", "best\n(epoch)", "last\n(epoch)", "gap\nbest", "gap\nlast", "sharpness\nlast", "rank\ncorr.")


def check_studies(studies: Mapping[str, Study]) -> None:
    """Studies that can share a picture: landscapes alike, accuracies of alike data and attacks; else ConfigError."""
    check_alike([record for study in studies.values() for record in study.landscapes])
    check_selections({name: study.selection for name, study in studies.items()})


def starred(name: str, study: Study) -> str:
    """The name of a run, with a star if its best epoch was chosen on the test set."""
    return f"{name}*" if study.on_test else name


def overfit_table(studies: Mapping[str, Study]) -> Table:
    """One row per run: robust accuracy of the best and the last epoch, their gaps, and the last sharpness.

    That is of the last epoch measured: another one than the last one probed is told beside it.
    """
    check_studies(studies)
    rows = []
    for name, study in studies.items():
        best, last = study.ends
        rows.append(
            (
                starred(name, study),
                *(f"{_points(end.robust)} ({end.epoch})" for end in (best, last)),
                *(_points(end.gap) for end in (best, last)),
                spread(study.rises[-1], 2) + ("" if study.epochs[-1] == last.epoch else f" ({study.epochs[-1]})"),
                "" if np.isnan(study.correlation) else f"{study.correlation:+.2f}",
            )
        )
    return Table(HEADER, tuple(rows))


def _points(share: float | None) -> str:
    """0.512 -> '51.2'; nothing for nothing."""
    return "" if share is None else f"{100 * share:.1f}"


def draw_overfit(studies: Mapping[str, Study], path: Path) -> Path:
    """Robust accuracy, its gap and the sharpness of kept weights over epochs, and the last two against each other."""
    check_studies(studies)
    figure = blank(11, 7.4)
    (accuracy, gap), (sharp, cloud) = figure.subplots(2, 2)
    for i, (name, study) in enumerate(studies.items()):
        style = line_style(i)
        _accuracy(accuracy, study, style)
        x = [r.epoch for r in study.probed]
        gap.plot(x, [np.nan if r.gap is None else 100 * r.gap for r in study.probed], linewidth=1.6, **style)
        _sharpness(sharp, study, style)
        known = "" if np.isnan(study.correlation) else f" ({study.correlation:+.2f})"
        dot = mark_of(i)
        cloud.plot(100 * study.pairs[:, 0], study.pairs[:, 1], dot, color=style["color"], markersize=5, alpha=0.8)
        cloud.plot([], [], dot, color=style["color"], markersize=5, label=f"{starred(name, study)}{known}")
    first = next(iter(studies.values()))
    where = first.selection.data.replace("_", "-")
    at = f"{first.landscapes[0].axis[-1]:g}"
    dress(accuracy, "robust accuracy", "epoch", "percent", whole_x=True)
    dress(gap, f"robust generalization gap (train - {where})", "epoch", "points", whole_x=True)
    dress(sharp, f"sharpness of kept weights: rise at {at}", "epoch", "nats, mean ± std over directions", whole_x=True)
    dress(cloud, "gap against sharpness, by epoch", "robust generalization gap, points", "sharpness, nats")
    gap.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    sharp.set_ylim(bottom=0)
    cloud.set_ylim(bottom=0)
    for label, line in ((where, "-"), ("train", "--"), ("best epoch", "o"), ("last epoch", "s")):
        accuracy.plot([], [], line, color="0.3", label=label, markersize=5)
    accuracy.legend(frameon=False, fontsize=8)
    legend(cloud, title="run (rank correlation)")
    return finish(figure, _caption(list(studies.values())), path)


def _accuracy(axes: Axes, study: Study, style: dict[str, Any]) -> None:
    x = [r.epoch for r in study.probed]
    axes.plot(x, [100 * (r.robust or 0) for r in study.probed], linewidth=1.6, **style)
    seen = [np.nan if r.train_robust is None else 100 * r.train_robust for r in study.probed]
    axes.plot(x, seen, linewidth=1.0, color=style["color"], linestyle="--")
    for end, mark in zip(study.ends, "os", strict=True):
        axes.plot(end.epoch, 100 * (end.robust or 0), mark, color=style["color"], markersize=5)


def _sharpness(axes: Axes, study: Study, style: dict[str, Any]) -> None:
    mean = study.rises.mean(1)
    axes.plot(study.epochs, mean, linewidth=1.6, marker="o", markersize=3, **style)
    if study.rises.shape[1] > 1:
        std = study.rises.std(1, ddof=1)
        axes.fill_between(study.epochs, mean - std, mean + std, color=style["color"], alpha=0.15, linewidth=0)


def _caption(studies: Sequence[Study]) -> str:
    text = f"accuracies under the recipe's selection attack. Sharpness: {caption([s.landscapes[-1] for s in studies])}"
    return f"{text}; {STAR}" if any(s.on_test for s in studies) and STAR not in text else text
