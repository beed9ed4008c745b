"""TRADES (Zhang et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flatrock.core.options import choose, share, weight
from flatrock.core.types import Parts, Views
from flatrock.objectives.terms import cross_entropy, kl_per_sample, need

# The official code passes x twice in train mode (once for CE, once for KL): same values, one more BatchNorm tick.
# RAT's code makes eight passes for its terms.
PASSES = {
    "paper": ("clean", "adv"),
    "code": ("clean", "adv", "clean"),
    "awp_code": ("adv", "clean", "clean"),
    "rat_code": ("clean", "adv", "adv", "clean", "adv", "clean", "adv", "clean"),
}


@dataclass(frozen=True, kw_only=True)
class TRADES:
    """CE(z(x), y) + beta * KL(s || t), x' from PGD on the same KL; no stop-gradient on either side.

    `forwards` names the order of the train-mode passes, which only matters to BatchNorm's running statistics.
    `label_smoothing` concerns the cross-entropy: see `terms.cross_entropy`.
    """

    beta: float = 6.0
    forwards: str = "paper"
    label_smoothing: float = 0.0
    inner_loss: ClassVar[str] = "kl"
    hard_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        weight("trades", "beta", self.beta)
        choose("trades", "forwards", self.forwards, PASSES)
        share("trades", "label_smoothing", self.label_smoothing, less=True)

    @property
    def passes(self) -> tuple[str, ...]:
        """Clean and adversarial pass, in the order the option names."""
        return PASSES[self.forwards]

    def loss(self, views: Views, y: Tensor) -> Parts:
        """The TRADES loss; unlabeled samples (y = -1) take part in the KL only."""
        clean, adv = need(views.clean).logits, need(views.adv).logits
        ce = cross_entropy(clean, y, smoothing=self.label_smoothing)
        terms = {"ce": ce, "kl": kl_per_sample(clean, adv).mean()}
        return Parts(terms, {"ce": 1.0, "kl": self.beta})
