"""What attacks climb: per-sample losses of (logits, target), higher = more adversarial.

z are logits, y the true class, pi the classes by falling logit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.registry import unknown
from flatrock.core.types import SampleLoss


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """-log softmax(z)_y; target holds class indices or rows of class probabilities."""
    return F.cross_entropy(logits, target, reduction="none")


def best_other(logits: Tensor, y: Tensor) -> Tensor:
    """max_{k != y} z_k."""
    return logits.scatter(1, y[:, None], -torch.inf).amax(1)


def true_logit(logits: Tensor, y: Tensor) -> Tensor:
    """z_y."""
    return logits.gather(1, y[:, None]).squeeze(1)


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max_{k != y} z_k - z_y: positive exactly when the sample is misclassified."""
    return best_other(logits, y) - true_logit(logits, y)


def cw(logits: Tensor, y: Tensor, *, kappa: float = 50.0) -> Tensor:
    """-max(z_y - max_{k != y} z_k + kappa, 0); kappa 50 (TRADES family) keeps the clamp inactive in practice."""
    return -(kappa - margin(logits, y)).clamp_min(0)


def targeted_margin(logits: Tensor, pair: Tensor) -> Tensor:
    """z_T - z_y with pair = (y, T) per row."""
    return true_logit(logits, pair[:, 1]) - true_logit(logits, pair[:, 0])


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """-(z_y - max_{k != y} z_k) / (z_pi1 - z_pi3 + 1e-12): invariant to shift and positive scale."""
    need_classes("dlr", logits.shape[1])
    top = logits.topk(3, dim=1).values
    return margin(logits, y) / (top[:, 0] - top[:, 2] + 1e-12)


def dlr_targeted(logits: Tensor, pair: Tensor) -> Tensor:
    """-(z_y - z_T) / (z_pi1 - (z_pi3 + z_pi4)/2 + 1e-12) with pair = (y, T) per row."""
    need_classes("targeted dlr", logits.shape[1])
    top = logits.topk(4, dim=1).values
    return targeted_margin(logits, pair) / (top[:, 0] - 0.5 * (top[:, 2] + top[:, 3]) + 1e-12)


def kl(logits: Tensor, log_clean: Tensor) -> Tensor:
    """KL(s || t), s the clean distribution (given as log-probabilities), t = softmax(z)."""
    return F.kl_div(F.log_softmax(logits, 1), log_clean, reduction="none", log_target=True).sum(1)


@dataclass(frozen=True)
class GuidedLoss:
    """-sum_k p_k log t_k + weight * ||s - t||_2^2, t = softmax(z); a row of the target holds p, the label, and then s.

    Two of the same weight are the same loss: recordings of attacks are found by it.
    """

    weight: float

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        """Per sample."""
        label, clean = target.chunk(2, 1)
        return cross_entropy(logits, label) + self.weight * (clean - F.softmax(logits, 1)).square().sum(1)


# The fewest classes a loss is defined for, where there is such a number, and what to climb instead.
_LEAST_CLASSES = {"dlr": (3, "'cw'"), "targeted dlr": (4, "loss 'margin'")}


def need_classes(loss: str, classes: int | None) -> None:
    """ConfigError if the loss of this name is not defined for so few classes; None: not known yet."""
    least, instead = _LEAST_CLASSES.get(loss, (0, ""))
    if classes is not None and classes < least:
        raise ConfigError(f"loss {loss!r} needs at least {least} classes, the model has {classes}; use {instead}")


# The losses a PGD row may climb by name; each takes true labels as target.
LABEL_LOSSES: dict[str, SampleLoss] = {"ce": cross_entropy, "cw": cw, "margin": margin, "dlr": dlr}


def label_loss(name: str) -> SampleLoss:
    """The loss called `name`, or an error that lists the choices."""
    if not isinstance(name, str) or name not in LABEL_LOSSES:
        raise ConfigError(unknown("attack loss", name, LABEL_LOSSES))
    return LABEL_LOSSES[name]
