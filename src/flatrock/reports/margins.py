"""How sure a model is: logit of the true class minus the largest other one, without attack and at worst."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flatrock.core.errors import StateError
from flatrock.core.records import Result
from flatrock.reports.style import COLOURS, blank, dress, finish
from flatrock.reports.waterfall import caption

BINS = 60
# Margins beyond these shares of all are few and would squeeze the rest; they are put into the outermost bins.
TAIL = 0.002
WORDS = {"clean": "without attack", "worst": "worst over all attacks"}


def draw_margins(result: Result, path: Path) -> Path:
    """Both distributions over one axis; left of 0 a sample is wrong. StateError where there are no margins."""
    found = {name: result.margins[name].double().numpy() for name in WORDS if name in result.margins}
    finite = {name: values[np.isfinite(values)] for name, values in found.items()}
    every = np.concatenate([*finite.values(), np.zeros(0)])
    if not every.size:
        raise StateError("there is nothing to draw: the result has no margins")
    low, high = np.quantile(every, [TAIL, 1 - TAIL])
    edges = np.linspace(min(low, 0.0), max(high, low + 1e-6, 1e-6), BINS + 1).tolist()
    figure = blank(7.2, 3.6)
    axes = figure.subplots()
    for (name, values), colour in zip(finite.items(), COLOURS, strict=False):
        inside = np.clip(values, edges[0], edges[-1])
        weights = np.full(values.size, 100 / result.n)
        axes.hist(inside, edges, weights=weights, histtype="stepfilled", alpha=0.35, color=colour)
        axes.hist(inside, edges, weights=weights, histtype="step", color=colour, label=WORDS[name])
    axes.axvline(0, color="0.3", linewidth=0.9)
    dress(axes, "margins: left of 0 a sample is wrong", "true logit minus the largest other", "percent of all samples")
    axes.legend(frameon=False, fontsize=8)
    return finish(figure, caption(result), path)
