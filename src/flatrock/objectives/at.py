"""Adversarial training (Madry et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flatrock.core.options import choose, share
from flatrock.core.types import Parts, Views
from flatrock.objectives.terms import cross_entropy, need

# S2O's AT code passes both batches twice in train mode: same values, two more BatchNorm ticks.
PASSES = {"paper": ("adv",), "s2o_code": ("clean", "adv", "clean", "adv")}


@dataclass(frozen=True, kw_only=True)
class AT:
    """CE(z(x'), y), x' from PGD on cross-entropy.

    `forwards` names the order of the train-mode passes, which only matters to BatchNorm's running statistics.
    `label_smoothing`: see `terms.cross_entropy`.
    """

    forwards: str = "paper"
    label_smoothing: float = 0.0
    inner_loss: ClassVar[str] = "ce"
    hard_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        choose("at", "forwards", self.forwards, PASSES)
        share("at", "label_smoothing", self.label_smoothing, less=True)

    @property
    def passes(self) -> tuple[str, ...]:
        """The adversarial pass, or those the option names."""
        return PASSES[self.forwards]

    def loss(self, views: Views, y: Tensor) -> Parts:
        """Cross-entropy on adversarial inputs."""
        ce = cross_entropy(need(views.adv).logits, y, smoothing=self.label_smoothing)
        return Parts({"ce_adv": ce}, {"ce_adv": 1.0})
