"""Adversarial logit pairing (Kannan et al. 2018) and its softmax form (TrH appendix)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.options import choose, share, weight
from flatrock.core.types import Parts, Views
from flatrock.objectives.terms import cross_entropy, need


@dataclass(frozen=True, kw_only=True)
class ALP:
    """CE(z(x'), y) + weight * mean ||a - a'||_2^2, x' from PGD on cross-entropy.

    `pair: logits` (Kannan) pairs a = z; `pair: probabilities` (TrH) pairs a = softmax(z). Gradients flow through
    both sides unless `stop_clean` detaches the clean one. `label_smoothing`: see `terms.cross_entropy`.
    """

    weight: float = 0.5
    pair: str = "logits"
    stop_clean: bool = False
    label_smoothing: float = 0.0
    passes: ClassVar[tuple[str, ...]] = ("clean", "adv")
    inner_loss: ClassVar[str] = "ce"
    hard_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        weight("alp", "weight", self.weight)
        share("alp", "label_smoothing", self.label_smoothing, less=True)
        choose("alp", "pair", self.pair, ("logits", "probabilities"))
        if not isinstance(self.stop_clean, bool):
            raise ConfigError(f"alp stop_clean must be true or false, got {self.stop_clean!r}")

    def loss(self, views: Views, y: Tensor) -> Parts:
        """Adversarial cross-entropy plus the squared distance of the pair."""
        clean, adv = need(views.clean).logits, need(views.adv).logits
        ce = cross_entropy(adv, y, smoothing=self.label_smoothing)
        if self.pair == "probabilities":
            clean, adv = F.softmax(clean, 1), F.softmax(adv, 1)
        if self.stop_clean:
            clean = clean.detach()
        pairing = (clean - adv).square().sum(1).mean()
        name = f"pair_{self.pair}"
        return Parts({"ce_adv": ce, name: pairing}, {"ce_adv": 1.0, name: self.weight})
