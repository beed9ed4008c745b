"""GAT: guided adversarial training on one attack step (Sriramanan et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from flatrock.core.hooks import Moment
from flatrock.core.options import share, weight
from flatrock.core.types import Parts, Views
from flatrock.objectives.terms import cross_entropy, need


@dataclass(frozen=True, kw_only=True)
class GAT:
    """CE(z(x), y) + weight * mean ||s - t||_2^2, x' from the attack `guided`, which climbs the same distance.

    `weight` is `rise` times as large from the share `rise_after` of training on: 40 after epoch 85 of 100. In a recipe
    the attack takes these three from here unless it has its own. Nothing is detached; the passes are made in the order
    clean, adv (the sources give none). `label_smoothing` concerns the cross-entropy: see `terms.cross_entropy`.
    """

    weight: float = 10.0
    rise: float = 4.0
    rise_after: float = 0.85
    label_smoothing: float = 0.0
    passes: ClassVar[tuple[str, ...]] = ("clean", "adv")
    inner_loss: ClassVar[str] = "guided"
    hard_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("weight", "rise"):
            weight("gat", name, getattr(self, name))
        share("gat", "rise_after", self.rise_after)
        share("gat", "label_smoothing", self.label_smoothing, less=True)

    def at(self, moment: Moment) -> GAT:
        """With the weight of this step, which does not rise again."""
        grown = self.rise if moment.share >= self.rise_after else 1.0
        return replace(self, weight=grown * self.weight, rise=1.0)

    def loss(self, views: Views, y: Tensor) -> Parts:
        """The GAT loss with `weight` as it is."""
        clean, adv = need(views.clean).logits, need(views.adv).logits
        distance = (F.softmax(clean, 1) - F.softmax(adv, 1)).square().sum(1).mean()
        ce = cross_entropy(clean, y, smoothing=self.label_smoothing)
        terms = {"ce": ce, "pair_probabilities": distance}
        return Parts(terms, {"ce": 1.0, "pair_probabilities": self.weight})
