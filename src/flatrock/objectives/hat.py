"""HAT: helper-based adversarial training (Rade & Moosavi-Dezfooli 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.options import choose, share, weight
from flatrock.core.types import Parts, Views
from flatrock.objectives.terms import cross_entropy, kl_per_sample, need


@dataclass(frozen=True, kw_only=True)
class HAT:
    """CE(z(x), y) + beta * KL(s || t) + gamma * CE(z(x_h), y_h), x' from PGD on the KL as in TRADES.

    x_h = x + reach * (x' - x) goes beyond x', out of the ball and maybe the box; y_h is the class a network trained
    without attacks, the helper, gives x'. Both are constants. `helper` is its run folder (the best epoch) or one of its
    checkpoints. gamma 0 is TRADES: no third pass, no helper. `label_smoothing` (see `terms.cross_entropy`) concerns y,
    not what the helper says.

    `form: at` is HAT on AT, as in the official code: CE(z(x), y) + beta * CE(z(x'), y) + gamma * CE(z(x_h), y_h), x'
    from PGD on cross-entropy.
    """

    beta: float = 2.5
    gamma: float = 0.5
    reach: float = 2.0
    helper: str = ""
    form: str = "trades"
    label_smoothing: float = 0.0
    hard_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("beta", "gamma", "reach"):
            weight("hat", name, getattr(self, name))
        choose("hat", "form", self.form, ("trades", "at"))
        share("hat", "label_smoothing", self.label_smoothing, less=True)
        if not isinstance(self.helper, str):
            raise ConfigError(f"hat helper must be the path of a run folder or checkpoint, got {self.helper!r}")
        if self.gamma > 0 and not self.helper:
            raise ConfigError(
                "hat helper is missing: name the run folder or checkpoint of a network trained without attacks, "
                "for example helper: runs/cifar10_short_standard (or set gamma to 0, which is TRADES)"
            )

    @property
    def passes(self) -> tuple[str, ...]:
        """In the order of the official code."""
        return ("clean", "adv", "helper") if self.gamma > 0 else ("clean", "adv")

    @property
    def inner_loss(self) -> str:
        """What the attack of TRADES, or that of AT, climbs."""
        return "ce" if self.form == "at" else "kl"

    def loss(self, views: Views, y: Tensor) -> Parts:
        """The HAT loss; unlabeled samples (y = -1) take part in all terms without y: the helper labels them too."""
        clean, adv = need(views.clean).logits, need(views.adv).logits
        terms = {"ce": cross_entropy(clean, y, smoothing=self.label_smoothing)}
        if self.form == "at":
            terms["ce_adv"] = cross_entropy(adv, y, smoothing=self.label_smoothing)
        else:
            terms["kl"] = kl_per_sample(clean, adv).mean()
        weights = {name: 1.0 if name == "ce" else self.beta for name in terms}
        if self.gamma > 0:
            if views.helper_y is None:
                raise RuntimeError("the objective was not given the labels of its helper")
            terms["ce_helper"] = F.cross_entropy(need(views.helper).logits, views.helper_y)
            weights["ce_helper"] = self.gamma
        return Parts(terms, weights)
