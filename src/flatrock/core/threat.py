"""What the attacker may do: a norm ball of radius eps inside the box [0, 1]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from flatrock.core.errors import ConfigError, ThreatError
from flatrock.core.numbers import number
from flatrock.core.rng import SampleGen

# Smallest norm a vector is divided by; keeps a zero gradient a zero step instead of NaN.
TINY = 1e-12


@runtime_checkable
class Threat(Protocol):
    """The geometry every attack and projection needs, and nothing else."""

    norm: ClassVar[str]

    @property
    def eps(self) -> float:
        """Radius in pixel units (inputs live in [0, 1])."""

    @property
    def default_step(self) -> float:
        """Step size used when none is given."""

    def project(self, delta: Tensor) -> Tensor:
        """Nearest point of the ball to each row of delta."""

    def ascent(self, grad: Tensor) -> Tensor:
        """Steepest ascent direction of unit size in this norm; zero where the gradient is zero."""

    def size(self, delta: Tensor) -> Tensor:
        """Norm of each row of delta, shape [n]."""

    def sample(self, like: Tensor, gen: SampleGen) -> Tensor:
        """A random point of the ball for each row of `like`."""


def _radius(norm: str, eps: Any, largest: float, hint: str) -> float:
    """eps as a Python float; numpy's numbers, those in a tensor without dimensions and '8/255' are numbers too."""
    value = eps.item() if isinstance(eps, Tensor | np.ndarray) and eps.ndim == 0 else eps
    if isinstance(value, str):
        try:
            value = number(value)
        except ConfigError as error:
            raise ThreatError(f"{norm} eps must be a number, got {eps!r}: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ThreatError(f"{norm} eps must be a number, got {eps!r}")
    if not 0 <= value <= largest:  # false for NaN
        raise ThreatError(f"{norm} eps must lie in [0, {largest:g}], got {eps!r}; {hint}")
    return float(value)


def rows(per_sample: Tensor, like: Tensor) -> Tensor:
    """Reshape a [n] tensor so that it broadcasts over the rows of `like`."""
    return per_sample.reshape(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class Linf:
    """max_i |delta_i| <= eps."""

    eps: float
    norm: ClassVar[str] = "linf"

    if TYPE_CHECKING:  # what may be given; what is kept is a float

        def __init__(self, eps: float | str) -> None: ...

    def __post_init__(self) -> None:
        radius = _radius("Linf", self.eps, 1.0, "eps is in pixel units of [0, 1]: write 8/255, not 8")
        object.__setattr__(self, "eps", radius)

    @property
    def default_step(self) -> float:
        """eps/4: the field's 2/255 at 8/255."""
        return self.eps / 4

    def project(self, delta: Tensor) -> Tensor:
        """Clip every coordinate to [-eps, eps]."""
        return delta.clamp(-self.eps, self.eps)

    def ascent(self, grad: Tensor) -> Tensor:
        """sign(g)."""
        return grad.sign()

    def size(self, delta: Tensor) -> Tensor:
        """max_i |delta_i| per row."""
        if delta.shape[0] == 0:
            return delta.new_zeros(0)
        return delta.flatten(1).abs().amax(1)

    def sample(self, like: Tensor, gen: SampleGen) -> Tensor:
        """U(-eps, eps) per coordinate."""
        return (2 * gen.uniform(like) - 1) * self.eps


@dataclass(frozen=True)
class L2:
    """||delta||_2 <= eps."""

    eps: float
    norm: ClassVar[str] = "l2"

    if TYPE_CHECKING:

        def __init__(self, eps: float | str) -> None: ...

    def __post_init__(self) -> None:
        # sqrt(3*224*224) = 388 is the diameter of the largest box in common use; the attack guard
        # compares eps with the diameter of the box at hand.
        radius = _radius("L2", self.eps, 388.0, "eps is in pixel units of [0, 1]: write 128/255, not 128")
        object.__setattr__(self, "eps", radius)

    @property
    def default_step(self) -> float:
        """15/128 of eps: the field's 15/255 at 128/255."""
        return self.eps * 15 / 128

    def project(self, delta: Tensor) -> Tensor:
        """Shrink rows longer than eps to length eps."""
        factor = (self.eps / self.size(delta).clamp_min(TINY)).clamp(max=1.0)
        return delta * rows(factor, delta)

    def ascent(self, grad: Tensor) -> Tensor:
        """g / ||g||_2, zero for a zero gradient. As sign(g) does, a coordinate whose slope is NaN stays where it is."""
        return _unit(torch.nan_to_num(grad))

    def size(self, delta: Tensor) -> Tensor:
        """||delta||_2 per row."""
        return _length(delta)

    def sample(self, like: Tensor, gen: SampleGen) -> Tensor:
        """Uniform direction, radius U(0, 1)*eps (the start used by AT and AWP)."""
        direction = _unit(gen.child("direction").normal(like))
        radius = gen.child("radius").uniform(like.flatten(1)[:, :1]) * self.eps
        return direction * rows(radius.squeeze(1), like)


def _length(v: Tensor) -> Tensor:
    # Summed in float64: over an ImageNet image float32 sums are off by more than the guard of attacks forgives.
    length: Tensor = torch.linalg.vector_norm(v.flatten(1), dim=1, dtype=torch.float64)
    return length.to(v.dtype)


def _unit(v: Tensor) -> Tensor:
    """Each row divided by its Euclidean length; scaled by its largest entry first so tiny rows do not underflow."""
    scale = v.flatten(1).abs().amax(1)
    v = v / rows(scale.clamp_min(torch.finfo(v.dtype).tiny), v)
    return v / rows(_length(v).clamp_min(TINY), v)


THREATS: dict[str, type[Linf] | type[L2]] = {Linf.norm: Linf, L2.norm: L2}


def norm_named(text: str | None) -> str | None:
    """A norm as THREATS names it: other tools write Linf and L2."""
    return text.lower() if isinstance(text, str) else text
