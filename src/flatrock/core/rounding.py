"""Whether two answers of a network to the same inputs differ by more than rounding."""

from __future__ import annotations

import torch
from torch import Tensor

# Passes over the same inputs may differ by this much through rounding alone: relative to the widest lead of a class
# over the next, and relative to the logit itself, which float32 rounds however large it is.
SAME, ROUNDING = 1e-4, 1e-6


def gap(first: Tensor, second: Tensor) -> float:
    """How far two answers [n, classes] lie apart, relative to the widest lead; 0 within rounding, NaN if one has NaN.

    Logits count from the largest of their row: what is added to all of them changes neither class nor loss, and a class
    that is masked with -1e9 says nothing of the size of the others.
    """
    first, second = first.double(), second.double()
    if first.shape != second.shape:
        return float("inf")
    if not first.numel():
        return 0.0
    top = first.amax(1, keepdim=True)
    leads = first.topk(min(2, first.shape[1]), dim=1).values
    lead = float((leads[:, 0] - leads[:, -1]).max())
    apart = (first - top - second + second.amax(1, keepdim=True)).abs()
    rounded = SAME * lead + ROUNDING * torch.maximum(first.abs(), top.abs())
    return float(torch.where(apart <= rounded, 0, apart).max()) / (lead or 1.0)  # NaN is not <=, and the largest
