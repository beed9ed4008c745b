"""Second-order optimisation of adversarial training (S2O, Jin et al., CVPR 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flatrock.core.errors import ConfigError
from flatrock.core.hooks import Flatness, Look, Penalty
from flatrock.core.options import weight
from flatrock.flatness.soft_labels import both_passes, s2o_matrix, soft_kl


@dataclass(frozen=True, kw_only=True)
class S2O(Flatness):
    """(1 - weight) * the objective's label terms + weight * (KL(B[y] || s) + KL(B'[y] || t)) / 2.

    B and B' are `s2o_matrix` of the clean and the adversarial logits, s and t their probabilities. The official code
    takes weight 0.3 with TRADES and MART, 0.1 with AT; `cc` is the mass of B off its diagonal, by default 1 - 2/C: the
    official 0.8 and 0.98 for 10 and 100 classes.
    """

    weight: float = 0.3
    cc: float | None = None
    needs_attack: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value in (("weight", self.weight), ("cc", 0.0 if self.cc is None else self.cc)):
            weight("s2o", name, value)
            if value > 1:
                raise ConfigError(f"s2o {name} must lie in [0, 1], got {value!r}")

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Both passes, unless the weight is 0."""
        return ("clean", "adv") if self.weight > 0 else ()

    def in_loss(self, look: Look) -> Penalty | None:
        """The divergence from the soft labels."""
        if self.weight == 0:
            return None
        views = both_passes(look.views)
        halves = [soft_kl(s2o_matrix(v.logits, self.cc, look.team), look.y, v.logits) for v in views]
        return Penalty({"s2o": (halves[0] + halves[1]) / 2}, {"s2o": self.weight}, label_factor=1 - self.weight)
