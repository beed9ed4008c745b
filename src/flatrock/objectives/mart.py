"""MART (Wang et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from flatrock.core.types import Parts, Views
from flatrock.objectives.options import choose, weight
from flatrock.objectives.terms import kl_per_sample, need


@dataclass(frozen=True, kw_only=True)
class MART:
    """BCE(x') + beta * KL(s || t) * (1 - s_y), x' from PGD on cross-entropy.

    BCE = CE(z(x'), y) - log(1 - t_kappa), kappa the most probable wrong class at x'. Nothing is detached but the
    index kappa. `form: paper` evaluates the logarithm stably in log space; `form: code` uses the official
    constants 1.0001, 1.0000001 and 1e-12.
    """

    beta: float = 5.0
    form: str = "paper"
    passes: ClassVar[tuple[str, ...]] = ("clean", "adv")
    inner_loss: ClassVar[str] = "ce"
    hard_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        weight("mart", "beta", self.beta)
        choose("mart", "form", self.form, ("paper", "code"))

    def loss(self, views: Views, y: Tensor) -> Parts:
        """The MART loss; needs class indices."""
        clean, adv = need(views.clean).logits, need(views.adv).logits
        own = F.one_hot(y, adv.shape[1]).bool()
        kappa = adv.masked_fill(own, -torch.inf).argmax(1)
        if self.form == "code":
            bce, wkl = _code_form(clean, adv, y, kappa)
        else:
            bce, wkl = _log_space_form(clean, adv, y, kappa)
        return Parts(bce + self.beta * wkl, {"bce": bce, "wkl": wkl})


def _log_space_form(clean: Tensor, adv: Tensor, y: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    others = adv.masked_fill(F.one_hot(kappa, adv.shape[1]).bool(), -torch.inf)
    log_rest = torch.logsumexp(others, 1) - torch.logsumexp(adv, 1)  # log(1 - t_kappa)
    bce = (F.cross_entropy(adv, y, reduction="none") - log_rest).mean()
    confidence = F.softmax(clean, 1).gather(1, y[:, None]).squeeze(1)
    return bce, (kl_per_sample(clean, adv) * (1 - confidence)).mean()


def _code_form(clean: Tensor, adv: Tensor, y: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    s, t = F.softmax(clean, 1), F.softmax(adv, 1)
    t_kappa = t.gather(1, kappa[:, None]).squeeze(1)
    bce = (F.cross_entropy(adv, y, reduction="none") - torch.log(1.0001 - t_kappa + 1e-12)).mean()
    kl = (s * (F.log_softmax(clean, 1) - torch.log(t + 1e-12))).sum(1)  # log s from logits: finite where s is 0
    confidence = s.gather(1, y[:, None]).squeeze(1)
    return bce, (kl * (1.0000001 - confidence)).mean()
