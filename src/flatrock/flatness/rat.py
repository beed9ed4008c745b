"""Randomized adversarial training via Taylor expansion (Jin et al., CVPR 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from flatrock.core.borrow import mode
from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.hooks import Flatness, Look, Moment, Penalty, Shift
from flatrock.core.options import choose, weight
from flatrock.core.team import ALONE, Team
from flatrock.core.types import Views
from flatrock.flatness.full_trace import check_higher_derivatives
from flatrock.flatness.rat_exact import exact_terms
from flatrock.flatness.soft_labels import both_passes, class_matrix, row_sums, soft_kl
from flatrock.flatness.tensors import chosen, noise

NAMES = ("rat_first", "rat_second")


@dataclass(frozen=True, kw_only=True)
class RAT(Flatness):
    """Adversarial inputs are crafted at w + u, u = sigma * N(0, 1); the loss gets eta * first + c * eta * second.

    `order` 0 keeps the noise alone, 1 adds the first term, 2 both; c is `second_factor` (0.5; 0.4 in the official
    ResNet-18 script). The paper's sigma is 0.01, the official code's 1e-4. `noise_on` names the tensors u moves; the
    code's rule is `conv_named`.

    `terms: top_layer` (official code): with r and r' the row sums of the last layer's gradient at x and x', M of
    `class_matrix`, s and t the clean and adversarial probabilities,
    first = (KL(M(|r|-|r'|)[y] || t) + KL(M(|r'|-|r|)[y] || s)) / 2, second likewise from r^2 and r'^2.
    The official code takes M(r'^2-r^2) for both halves of second (`second_pair: code`); `paper` pairs them as in first.
    `ce_weight: code` multiplies the objective's label terms by 1 - eta, `paper` leaves them. `cc` is the mass of M
    off its diagonal, by default 1 - 2/C: the official 0.8 and 0.98 for 10 and 100 classes.

    `terms: exact`: Eq. 8 itself, first = KL(softmax(J_x u) || softmax(J_x' u)), second the same of u^T H u, label
    terms untouched; `second_pair`, `ce_weight` and `cc` have no meaning there.
    """

    order: int = 2
    eta: float = 0.2
    sigma: float = 1e-4
    noise_on: str = "weights"
    terms: str = "top_layer"
    second_pair: str = "code"
    ce_weight: str = "code"
    second_factor: float = 0.5
    cc: float | None = None
    needs_attack: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.order, bool) or self.order not in (0, 1, 2):
            raise ConfigError(f"rat order must be 0, 1 or 2, got {self.order!r}")
        for name in ("eta", "sigma", "second_factor"):
            weight("rat", name, getattr(self, name))
        choose("rat", "noise_on", self.noise_on, ("weights", "conv", "conv_named"))
        choose("rat", "terms", self.terms, ("top_layer", "exact"))
        for name in ("second_pair", "ce_weight"):
            choose("rat", name, getattr(self, name), ("code", "paper"))
        if self.terms == "top_layer" and self.ce_weight == "code" and self.eta > 1:
            raise ConfigError(
                f"rat eta must lie in [0, 1], got {self.eta!r}: labels keep the weight 1 - eta; "
                "lower it, or set ce_weight to 'paper'"
            )
        if self.cc is not None:
            weight("rat", "cc", self.cc)
            if self.cc > 1:
                raise ConfigError(f"rat cc is a share of probability in [0, 1], got {self.cc!r}")

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Both passes for the top-layer terms; the exact ones make their own."""
        return ("clean", "adv") if self._adds_terms and self.terms == "top_layer" else ()

    @property
    def _adds_terms(self) -> bool:
        return self.order > 0 and self.eta > 0 and (self.terms == "top_layer" or self.sigma > 0)

    @property
    def takes_whole_batch(self) -> bool:
        """The exact terms make passes of their own."""
        return self._adds_terms and self.terms == "exact"

    def check(self, model: nn.Module) -> None:
        """There are tensors to put noise on, and the exact terms have gradients."""
        if self.sigma > 0:
            self._check_noise(model)
        if self._adds_terms and self.terms == "exact":
            with mode(model, training=False):  # as `exact_terms` runs it
                check_higher_derivatives(model, of="rat's exact terms", cure="terms: top_layer")

    def _check_noise(self, model: nn.Module) -> None:
        try:
            chosen(model, self.noise_on)
        except ModelError as error:
            if self.noise_on != "conv_named":
                raise
            raise ModelError(
                f"{error}; or set sigma to 0: the official code has no noise for such a network"
            ) from error

    def before_attack(self, model: nn.Module, moment: Moment) -> Shift:
        """The noise u of this step."""
        return noise(model, self.noise_on, self.sigma, moment.seed.child("rat", moment.step))

    def in_loss(self, look: Look) -> Penalty | None:
        """The derivative terms, or None if nothing asks for them."""
        if not self._adds_terms:
            return None
        if self.terms == "exact":
            u = dict(self.before_attack(look.model, look.moment))
            values = exact_terms(look.model, look.x, look.x_adv, u, order=self.order)
        else:
            values = top_layer_terms(
                look.views, look.y, order=self.order, second_pair=self.second_pair, cc=self.cc, team=look.team
            )
        weights = (self.eta, self.second_factor * self.eta)
        keeps_labels = self.terms == "exact" or self.ce_weight == "paper"
        return Penalty(
            terms=dict(zip(NAMES, values, strict=False)),
            weights=dict(zip(NAMES[: self.order], weights, strict=False)),
            label_factor=1.0 if keeps_labels else 1 - self.eta,
        )

    def passes(self, objective: int, attack: int) -> int:
        """Of the exact terms: clean and adversarial pass, each as dear as 2 (order 1) or 4 (order 2) plain ones."""
        return 2 * 2**self.order if self._adds_terms and self.terms == "exact" else 0


def top_layer_terms(
    views: Views, y: Tensor, *, order: int, second_pair: str, cc: float | None, team: Team = ALONE
) -> list[Tensor]:
    """First and, for order 2, second term from the two passes of the loss; no pass and no backward of its own."""
    clean, adv = both_passes(views)
    with torch.no_grad():
        r, r_adv = (row_sums(v.features, v.logits, y, team).abs() for v in (clean, adv))
        gap = r - r_adv if order == 1 else torch.stack([r - r_adv, r.square() - r_adv.square()])
        for_adv, for_clean = class_matrix(torch.stack([gap, -gap]), cc)
        if order == 2 and second_pair == "code":
            for_adv[1] = for_clean[1]
    values = (soft_kl(for_adv, y, adv.logits) + soft_kl(for_clean, y, clean.logits)) / 2
    return [values] if order == 1 else list(values)
