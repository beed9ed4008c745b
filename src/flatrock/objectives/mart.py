"""MART (Wang et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.options import choose, weight
from flatrock.core.types import Parts, Views
from flatrock.objectives.terms import kl_per_sample, need


@dataclass(frozen=True, kw_only=True)
class MART:
    """CE(z(x'), y) - log(1 - t_kappa) + beta * KL(s || t) * (1 - s_y), x' from PGD on cross-entropy.

    The first two are its boosted cross-entropy, kappa the most probable wrong class at x'. Nothing is detached but the
    index kappa. `form: paper` evaluates the logarithm stably in log space; `form: code` uses the official
    constants 1.0001, 1.0000001 and 1e-12. `ce: clean` takes the cross-entropy, not the margin, at x, as the TrH
    appendix writes MART. `label_smoothing` has no meaning here and must be 0.
    """

    beta: float = 5.0
    form: str = "paper"
    ce: str = "adv"
    label_smoothing: float = 0.0
    passes: ClassVar[tuple[str, ...]] = ("clean", "adv")
    inner_loss: ClassVar[str] = "ce"
    hard_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        weight("mart", "beta", self.beta)
        choose("mart", "form", self.form, ("paper", "code"))
        choose("mart", "ce", self.ce, ("adv", "clean"))
        if self.label_smoothing != 0:
            raise ConfigError(
                f"mart label_smoothing must be 0, got {self.label_smoothing!r}: its margin and its weights 1 - s_y are "
                "defined for classes, not for shares of them; leave it out, or use trades, at or alp"
            )

    def loss(self, views: Views, y: Tensor) -> Parts:
        """The MART loss; needs class indices."""
        clean, adv = need(views.clean).logits, need(views.adv).logits
        own = F.one_hot(y, adv.shape[1]).bool()
        kappa = adv.masked_fill(own, -torch.inf).argmax(1)
        form = _code_form if self.form == "code" else _log_space_form
        boost, wkl = form(clean, adv, y, kappa)
        name, judged = ("ce", clean) if self.ce == "clean" else ("ce_adv", adv)
        terms = {name: F.cross_entropy(judged, y), "boost": boost.mean(), "wkl": wkl.mean()}
        return Parts(terms, {name: 1.0, "boost": 1.0, "wkl": self.beta})


def _log_space_form(clean: Tensor, adv: Tensor, y: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    others = adv.masked_fill(F.one_hot(kappa, adv.shape[1]).bool(), -torch.inf)
    log_rest = torch.logsumexp(others, 1) - torch.logsumexp(adv, 1)  # log(1 - t_kappa)
    confidence = F.softmax(clean, 1).gather(1, y[:, None]).squeeze(1)
    return -log_rest, kl_per_sample(clean, adv) * (1 - confidence)


def _code_form(clean: Tensor, adv: Tensor, y: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    s, t = F.softmax(clean, 1), F.softmax(adv, 1)
    t_kappa = t.gather(1, kappa[:, None]).squeeze(1)
    boost = -torch.log(1.0001 - t_kappa + 1e-12)
    kl = (s * (F.log_softmax(clean, 1) - torch.log(t + 1e-12))).sum(1)  # log s from logits: finite where s is 0
    confidence = s.gather(1, y[:, None]).squeeze(1)
    return boost, kl * (1.0000001 - confidence)
