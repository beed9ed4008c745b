"""The terms of TrH's PAC-Bayes bound (Wang et al. 2023, Theorem 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.numbers import is_finite
from flatrock.diagnostics.estimate import Estimate, real

# Scales beyond this, or below its inverse, overflow where they are squared.
EXTREME = 1e50


@dataclass(frozen=True)
class PacBayes:
    """Loss of a network whose weights are noisy in the best way, Q = N(w, diag(sigma^2)), under P = N(0, sigma0^2 I).

        E_Q R <= risk + weights + trace + C + O(sigma0^4)
        weights = ||w||^2 / (2 beta sigma0^2),   trace = sigma0^2 / 2 * tr H

    with probability 1 - tau over the training data; C depends on tau, beta and the number of samples alone, and is left
    out. `logarithm` = 1 / (2 beta) sum_i log(1 + sigma0^2 beta H_ii) is what `trace` is the beginning of; it needs
    the diagonal, which is known only where the Hessian is computed exactly. `best_sigma0` makes weights + trace
    smallest, `best` is their sum there, sqrt(||w||^2 tr H / beta): a number to compare networks by, no bound, because a
    prior may not be chosen by looking.
    """

    sigma0: float
    beta: float
    risk: float
    weights: float
    trace: Estimate
    logarithm: float | None
    best_sigma0: float | None
    best: float | None

    @property
    def total(self) -> float:
        """risk + weights + trace."""
        return self.risk + self.weights + self.trace.value

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PacBayes:
        """From what dataclasses.asdict made of it; ValueError if `best` is not that of weights and trace."""
        sigma0, beta, risk, weights = (real(values[name]) for name in ("sigma0", "beta", "risk", "weights"))
        known = (values[name] for name in ("logarithm", "best_sigma0", "best"))
        logarithm, best_sigma0, best = (None if value is None else real(value) for value in known)
        trace = Estimate.from_dict(values["trace"])
        found = cls(sigma0, beta, risk, weights, trace, logarithm, best_sigma0, best)
        if found.best is not None and not math.isclose(
            found.best, 2 * math.sqrt(found.weights * found.trace.value), rel_tol=1e-6
        ):
            raise ValueError(f"least PAC-Bayes terms of {found.best} do not follow from weights and trace")
        return found


def pac_bayes(
    *, risk: float, squared_norm: float, trace: Estimate, sigma0: float, beta: float, diagonal: Tensor | None = None
) -> PacBayes:
    """The terms from the mean loss, ||w||^2, tr H and, if known, the diagonal of H."""
    check_scales(sigma0=sigma0, beta=beta)
    half = sigma0**2 / 2
    best_sigma0 = best = None
    if trace.value > 0 and squared_norm > 0:
        best_sigma0 = (squared_norm / (beta * trace.value)) ** 0.25
        best = math.sqrt(squared_norm * trace.value / beta)
    return PacBayes(
        sigma0=sigma0,
        beta=beta,
        risk=risk,
        weights=squared_norm / (2 * beta * sigma0**2),
        trace=Estimate(half * trace.value, half * trace.error, trace.draws),
        logarithm=None if diagonal is None else _logarithm(diagonal.double(), sigma0, beta),
        best_sigma0=best_sigma0,
        best=best,
    )


def check_scales(**scales: float) -> None:
    """sigma0 and beta are numbers > 0 whose squares and inverses are numbers, too; else ConfigError."""
    for name, value in scales.items():
        if not (is_finite(value) and value > 0):
            raise ConfigError(f"PAC-Bayes {name} must be a number > 0, got {value!r}")
        if not 1 / EXTREME <= value <= EXTREME:
            raise ConfigError(f"PAC-Bayes {name} must lie between {1 / EXTREME:g} and {EXTREME:g}, got {value!r}")


def _logarithm(diagonal: Tensor, sigma0: float, beta: float) -> float | None:
    """None where a negative entry of the diagonal leaves no variance that is optimal."""
    inner = sigma0**2 * beta * diagonal
    return None if bool((inner <= -1).any()) else float(torch.log1p(inner).sum()) / (2 * beta)
