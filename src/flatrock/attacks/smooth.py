"""PGD under noise that both inputs of a loss share: what a classifier that will be smoothed is trained with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from flatrock.attacks.gradient import GradientAttack
from flatrock.core.errors import ConfigError
from flatrock.core.options import noise_fault, weight
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat


@dataclass(frozen=True, kw_only=True)
class SmoothPGD(GradientAttack):
    """PGD on loss(z(x' + eta)), eta = sigma * N(0, I) drawn once per sample; x', without it, stays in ball and box.

    In training every input of the network gets the same eta. With `loss: kl`, whose clean side is z(x + eta), and the
    objective `trades` that is CE(z(x + eta), y) + beta * max_x' KL(s(x + eta) || t(x' + eta)) (Blum et al. 2020); with
    `loss: ce` and `at` it is SmoothAdv with one noise (Salman et al. 2019). sigma 0 is PGD, bit by bit. What breaks on
    the way is said by noisy inputs, so only the last point counts.
    """

    loss: str = "kl"
    sigma: float = 0.12
    iterate: str = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        weight("smooth-pgd", "sigma", self.sigma)
        if told := noise_fault(self.sigma):
            raise ConfigError(f"smooth-pgd sigma {told}")
        if self.iterate != "last":
            raise ConfigError(
                f"smooth-pgd iterate must be 'last', got {self.iterate!r}: what noisy inputs say on the way does not "
                "count; leave it out"
            )

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """Perturbed copy of x, without the noise."""
        noise = self.input_noise(x, gen)
        if noise is None:
            return super().__call__(model, x, y, threat, gen)
        aim = replace(self._aim(model, x + noise, y), noise=noise)
        return self._worst(aim, x, threat, gen, early_stop=False)

    def input_noise(self, x: Tensor, gen: SampleGen) -> Tensor | None:
        """eta of these samples, the same whenever it is asked for; None: there is none."""
        return self.sigma * gen.child("noise").normal(x) if self.sigma else None
