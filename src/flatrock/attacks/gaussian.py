"""Gaussian noise in the place of an attack: what classifiers that will be smoothed are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.options import noise_fault, weight
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """x' = x + sigma * N(0, I), in pixel units; neither projected nor clipped, as smoothing will not clip either.

    With the objective `at` this is training on noisy inputs (Cohen et al. 2019), with `trades` the answer to x is made
    stable under noise (the smoothing variant of Carmon et al. 2019). For training only: noise leaves ball and box.
    """

    sigma: float = 0.25
    mixed_labels: ClassVar[bool] = True
    bounded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        weight("gaussian", "sigma", self.sigma)
        if told := noise_fault(self.sigma):
            raise ConfigError(f"gaussian sigma {told}")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """A noisy copy of x; the model is not asked, and sigma 0 leaves x as it is."""
        return x + self.sigma * gen.normal(x) if self.sigma else x.clone()

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch: none."""
        return 0
