"""One line per sample of an evaluation, as CSV."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from flatrock.core.errors import StateError
from flatrock.core.files import write_csv
from flatrock.core.records import Result
from flatrock.reports.waterfall import order

Cells = list[str] | list[float] | list[int]


def write_samples(result: Result, path: Path | str) -> Path:
    """Write the columns of `sample_columns`."""
    path = Path(path)
    columns = sample_columns(result)
    write_csv(path, (name for name, _ in columns), zip(*(cells for _, cells in columns), strict=True))
    return path


def sample_columns(result: Result) -> list[tuple[str, Cells]]:
    """Who each sample is, what the model says, and what it withstands: 1 = right, 0 = wrong.

    Columns: id (place in the test set), label, prediction, clean_margin, worst_margin (logit of the true class minus
    the largest other one), clean, each attack, each plan, worst_case. Those of a plan's attacks say what stood after
    them. What the result does not know is left empty. StateError without labels.
    """
    if result.labels is None:
        raise StateError("the result has no labels, which a table of its samples needs; evaluate again")
    columns = [
        ("id", torch.arange(result.n) if result.ids is None else result.ids),
        ("label", result.labels),
        ("prediction", result.predictions),
        ("clean_margin", result.margins.get("clean")),
        ("worst_margin", result.margins.get("worst")),
        *((name, result.flags[name]) for name in ("clean", *order(result))),
        *((plan, result.flags[labels[-1]]) for plan, labels in result.plans.items()),
        ("worst_case", result.worst),
    ]
    return [(name, _cells(values, result.n)) for name, values in columns]


def _cells(values: Tensor | None, n: int) -> Cells:
    """As a result file writes them: no more digits than that, and flags as 1 and 0."""
    if values is None:
        return [""] * n
    if values.is_floating_point():
        return [round(v, 6) for v in values.double().tolist()]
    return [int(v) for v in values.tolist()]
