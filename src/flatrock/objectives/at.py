"""Adversarial training (Madry et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flatrock.core.options import share
from flatrock.core.types import Parts, Views
from flatrock.objectives.terms import cross_entropy, need


@dataclass(frozen=True, kw_only=True)
class AT:
    """CE(z(x'), y), x' from PGD on cross-entropy. `label_smoothing`: see `terms.cross_entropy`."""

    label_smoothing: float = 0.0
    passes: ClassVar[tuple[str, ...]] = ("adv",)
    inner_loss: ClassVar[str] = "ce"
    hard_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        share("at", "label_smoothing", self.label_smoothing, less=True)

    def loss(self, views: Views, y: Tensor) -> Parts:
        """Cross-entropy on adversarial inputs."""
        ce = cross_entropy(need(views.adv).logits, y, smoothing=self.label_smoothing)
        return Parts({"ce_adv": ce}, {"ce_adv": 1.0})
