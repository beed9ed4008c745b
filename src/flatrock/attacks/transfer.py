"""Transfer: inputs crafted on one network, a surrogate, to be judged on another that is never asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from flatrock.attacks.craft import check_attack
from flatrock.core.borrow import borrowed
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat
from flatrock.core.types import Attack


@dataclass(frozen=True)
class Transfer:
    """An attack `by` on the surrogate in place of the model, which answers no query and gives no gradient.

    The surrogate is attacked in eval mode and given back untouched; it must live on the device of the inputs.
    """

    surrogate: nn.Module = field(repr=False)
    by: Attack

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """Perturbed copy of x. early_stop is ignored: what breaks the surrogate need not break the model."""
        with borrowed(self.surrogate, x.device):
            return self.by(self.surrogate, x, y, threat, gen, early_stop=False)

    @property
    def mixed_labels(self) -> bool:
        """As the attack behind it."""
        return self.by.mixed_labels

    @property
    def bounded(self) -> bool:
        """As the attack behind it."""
        return self.by.bounded

    def check(self, threat: Threat | None, classes: int | None) -> None:
        """As the attack behind it."""
        check_attack(self.by, threat, classes)

    def passes(self, classes: int) -> int:
        """Forward passes per batch, at most: of the surrogate, as the model is not asked."""
        return self.by.passes(classes)
