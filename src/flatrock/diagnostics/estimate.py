"""A number and how far it may be off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A value, its standard error, and the number of independent draws the error was computed from; 0 draws = exact."""

    value: float
    error: float = 0.0
    draws: int = 0

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Where the true value lies with this probability: value -/+ t * error, Student's t of draws - 1 freedoms."""
        if self.draws == 0:
            return self.value, self.value
        from scipy.stats import t

        reach = float(t.ppf((1 + level) / 2, self.draws - 1)) * self.error
        return self.value - reach, self.value + reach

    def __str__(self) -> str:
        return within(self.value, self.error)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Estimate:
        """From what dataclasses.asdict made of it."""
        return cls(real(values["value"]), real(values["error"], least=0), whole(values["draws"]))


def real(value: object, *, least: float = -math.inf) -> float:
    """A number read from a file; ValueError if it is none, not finite, or less than it can be."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value or not math.isfinite(value):
        raise ValueError(f"expected a finite number{'' if least == -math.inf else f' >= {least:g}'}, got {value!r}")
    return float(value)


def whole(value: object, *, least: int = 0) -> int:
    """A whole number read from a file; ValueError if it is none or less than it can be."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"expected a whole number >= {least}, got {value!r}")
    return value


def within(value: float, error: float) -> str:
    """12.3 ± 1.2: the error with two digits, the value with as many places; four digits where no error would show."""
    if not error > 5e-4 * abs(value):
        return f"{value:.4g}"
    places = 1 - math.floor(math.log10(error))
    if not 0 <= places <= 6:
        return f"{value:.3g} ± {error:.2g}"
    return f"{value:.{places}f} ± {error:.{places}f}"


def standard_error(draws: Tensor) -> float:
    """Of the mean of independent draws [k], k >= 2."""
    return float(draws.double().std(correction=1)) / math.sqrt(len(draws))


def mean_of(draws: Tensor, *, above: float = 0.0) -> Estimate:
    """`above` plus the mean of independent draws."""
    return Estimate(above + float(draws.double().mean()), standard_error(draws), len(draws))


def dots(one: Tensor, other: Tensor) -> Tensor:
    """Inner products of the columns of two matrices, summed in float64: the parameters of a network are many."""
    pairs = zip(one.unbind(1), other.unbind(1), strict=True)
    return torch.stack([torch.dot(a.double(), b.double()) for a, b in pairs])
