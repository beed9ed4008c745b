"""The terms of the PAC-Bayes bound against the optimum found numerically."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.diagnostics.estimate import Estimate
from flatrock.diagnostics.pac_bayes import PacBayes, pac_bayes

WEIGHTS = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
DIAGONAL = torch.tensor([0.3, 4.0, 0.0], dtype=torch.float64)
RISK, SIGMA0, BETA = 0.7, 0.2, 50.0


def terms(*, sigma0: float = SIGMA0, diagonal: Tensor | None = DIAGONAL, beta: float = BETA) -> PacBayes:
    trace = Estimate(float(DIAGONAL.sum() if diagonal is None else diagonal.sum()), 0.5, 8)
    norm = float(WEIGHTS.square().sum())
    return pac_bayes(risk=RISK, squared_norm=norm, trace=trace, sigma0=sigma0, beta=beta, diagonal=diagonal)


def objective(variances: Tensor) -> Tensor:
    """E_Q R + KL(Q || P) / beta for a quadratic loss, Q = N(w, diag(variances)), P = N(0, sigma0^2 I)."""
    ratio = variances / SIGMA0**2
    kl = 0.5 * (ratio + WEIGHTS.square() / SIGMA0**2 - 1 - ratio.log()).sum()
    return RISK + 0.5 * (DIAGONAL * variances).sum() + kl / BETA


def test_the_logarithm_is_the_minimum_over_all_variances() -> None:
    best = 1 / (1 / SIGMA0**2 + BETA * DIAGONAL)
    found = terms()
    assert found.logarithm is not None
    assert float(objective(best)) == pytest.approx(found.risk + found.weights + found.logarithm, rel=1e-12)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert float(objective(best * factor)) > float(objective(best))


def test_the_trace_is_its_first_order_in_sigma0_squared() -> None:
    off = []
    for sigma0 in (0.02, 0.01):
        found = terms(sigma0=sigma0)
        assert found.logarithm is not None
        assert found.trace.value >= found.logarithm
        off.append(found.trace.value - found.logarithm)
    assert off[0] / off[1] == pytest.approx(16, rel=0.05)  # O(sigma0^4)


def test_terms_are_those_of_the_theorem() -> None:
    found = terms()
    assert found.weights == pytest.approx(5.25 / (2 * 50 * 0.04))
    assert found.trace == Estimate(pytest.approx(0.02 * 4.3), pytest.approx(0.02 * 0.5), 8)
    assert found.total == pytest.approx(0.7 + found.weights + found.trace.value)


def test_the_best_prior_makes_the_sum_smallest() -> None:
    found = terms()
    assert found.best_sigma0 is not None
    at = terms(sigma0=found.best_sigma0)
    assert at.weights + at.trace.value == pytest.approx(found.best, rel=1e-12)
    assert found.best == pytest.approx(math.sqrt(5.25 * 4.3 / 50))
    for factor in (0.8, 1.25):
        other = terms(sigma0=factor * found.best_sigma0)
        assert other.weights + other.trace.value > float(found.best or 0)


def test_what_is_not_known_is_none() -> None:
    assert terms(diagonal=None).logarithm is None
    negative = terms(diagonal=torch.tensor([-30.0, 1.0, 1.0]))
    assert (negative.logarithm, negative.best, negative.best_sigma0) == (None, None, None)
    assert negative.trace.value < 0


@pytest.mark.parametrize(("name", "value"), [("sigma0", 0.0), ("sigma0", math.nan), ("beta", -1.0), ("beta", math.inf)])
def test_scales_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a number > 0"):
        terms(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("sigma0", 1e-200), ("sigma0", 1e200), ("beta", 1e-300), ("beta", 1e60)])
def test_scales_whose_squares_are_no_numbers_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"PAC-Bayes {name} must lie between 1e-50 and 1e.50, got"):
        terms(**{name: value})


def test_they_survive_json() -> None:
    found = terms()
    assert PacBayes.from_dict(dataclasses.asdict(found)) == found
