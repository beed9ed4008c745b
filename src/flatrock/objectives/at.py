"""Adversarial training (Madry et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flatrock.core.types import Parts, Views
from flatrock.objectives.terms import cross_entropy, need


@dataclass(frozen=True, kw_only=True)
class AT:
    """CE(z(x'), y), x' from PGD on cross-entropy."""

    passes: ClassVar[tuple[str, ...]] = ("adv",)
    inner_loss: ClassVar[str] = "ce"
    hard_labels: ClassVar[bool] = False

    def loss(self, views: Views, y: Tensor) -> Parts:
        """Cross-entropy on adversarial inputs."""
        return Parts({"ce_adv": cross_entropy(need(views.adv).logits, y)}, {"ce_adv": 1.0})
