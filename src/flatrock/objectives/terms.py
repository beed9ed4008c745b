"""The pieces objectives are summed from, batch means of per-sample values.

s and t are the softmax of clean and adversarial logits. Nothing is detached here: gradients flow through both.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flatrock.core.types import View


def need(view: View | None) -> View:
    """The pass an objective asked for; absent only by a fault of the engine."""
    if view is None:
        raise RuntimeError("the objective was not given a network pass it asked for")
    return view


def cross_entropy(logits: Tensor, y: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Mean -log softmax(z)_y over the samples with a label; y holds indices (-1 = unlabeled) or probability rows.

    With `smoothing` e a label p of C classes counts as (1 - e) p + e/C; 0 changes no bit.
    """
    if y.is_floating_point():
        return F.cross_entropy(logits, y, label_smoothing=smoothing)
    per_sample = F.cross_entropy(logits, y, reduction="none", ignore_index=-1, label_smoothing=smoothing)
    return per_sample.sum() / (y >= 0).sum().clamp_min(1)


def kl_per_sample(clean: Tensor, adv: Tensor) -> Tensor:
    """KL(s || t) per sample, clean distribution first, from logits and in log space (no 0*log 0)."""
    return F.kl_div(F.log_softmax(adv, 1), F.log_softmax(clean, 1), reduction="none", log_target=True).sum(1)
