"""Soft labels from the statistics of a batch: the class matrices of RAT and S2O, and the loss against them.

Row k of a class matrix is the target distribution of samples of class k: 1 - cc on k itself and cc spread over the
other classes. Matrices are constants: no gradient flows into them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flatrock.core.team import ALONE, Team
from flatrock.core.types import View, Views

# Share of a row's mass below which it says nothing about the other classes.
NO_MASS = 1e-12


def both_passes(views: Views) -> tuple[View, View]:
    """The clean and the adversarial pass; absent only by a fault of the engine."""
    if views.clean is None or views.adv is None:
        raise RuntimeError("a method that needs the clean and the adversarial pass was not given both")
    return views.clean, views.adv


def label_rows(y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Labels as rows of probabilities [n, C], and how much of a label each sample has [n].

    y holds class indices, -1 = unlabeled (a row of zeros, share 0), or such rows already.
    """
    if y.is_floating_point():
        return y, y.sum(1)
    labelled = y >= 0
    rows = F.one_hot(y.clamp_min(0), classes) * labelled[:, None]
    return rows.to(torch.get_default_dtype()), labelled.to(torch.get_default_dtype())


@torch.no_grad()
def row_sums(features: Tensor, logits: Tensor, y: Tensor, team: Team = ALONE) -> Tensor:
    """Row sums [C] of the gradient of mean cross-entropy w.r.t. the last linear layer's weight, without a backward.

    r_j = mean_b (s_bj - [y_b = j]) * sum_i f_bi over the labelled samples b of all processes; they add up to 0.
    """
    rows, share = label_rows(y, logits.shape[1])
    error = logits.softmax(1) * share[:, None] - rows
    sums = (error * features.sum(1, keepdim=True)).sum(0)
    return team.total(sums) / team.total(share.sum()).clamp_min(NO_MASS)


@torch.no_grad()
def class_matrix(v: Tensor, cc: float | None = None) -> Tensor:
    """RAT's matrix M(v), [C, C] (or one per leading index of v): every row follows v - min v outside the diagonal."""
    classes = v.shape[-1]
    mass = v - v.amin(-1, keepdim=True)
    return _scaled(mass.unsqueeze(-2).expand(*v.shape, classes), cc)


@torch.no_grad()
def s2o_matrix(logits: Tensor, cc: float | None = None, team: Team = ALONE) -> Tensor:
    """S2O's matrix [C, C]: with A = sum_b z_b z_b^T, row k follows max_j |A_kj| - |A_kj| outside the diagonal."""
    correlation = team.total(logits.T @ logits).abs()
    return _scaled(correlation.amax(1, keepdim=True) - correlation, cc)


def _scaled(mass: Tensor, cc: float | None) -> Tensor:
    """Rows of mass >= 0 scaled to cc outside the diagonal, 1 - cc on it; cc = None stands for 1 - 2/C.

    A row whose mass lies on the diagonal alone, or that has none, is spread evenly over the other classes.
    """
    classes = mass.shape[-1]
    cc = 1 - 2 / classes if cc is None else cc
    own = torch.eye(classes, dtype=mass.dtype, device=mass.device)
    others = 1 - own
    off = mass / mass.sum(-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny) * others
    total = off.sum(-1, keepdim=True)
    spread = torch.where(total < NO_MASS, others * (cc / (classes - 1)), off * (cc / total.clamp_min(NO_MASS)))
    return spread + (1 - cc) * own


def soft_kl(matrix: Tensor, y: Tensor, logits: Tensor) -> Tensor:
    """Mean over the labelled samples of KL(matrix[y] || softmax(z)), with 0 log 0 = 0; one value per matrix given.

    A mixed label takes the same mixture of the matrix's rows.
    """
    if y.is_floating_point():
        target, share = y.to(matrix.dtype) @ matrix, y.sum(1)
    else:
        target, share = matrix[..., y.clamp_min(0), :], (y >= 0).to(matrix.dtype)
    divergence = F.kl_div(logits.log_softmax(1).expand_as(target), target, reduction="none").sum(-1)
    return (divergence * share).sum(-1) / share.sum().clamp_min(NO_MASS)
