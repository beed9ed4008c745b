"""What chance may do to an accuracy, against exact binomial odds."""

from __future__ import annotations

import math

import pytest

from flatrock.core.chance import far_below, guessed


def at_least(successes: int, n: int, p: float) -> float:
    """P(X >= successes) of a binomial."""
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(successes, n + 1))


@pytest.mark.parametrize(("classes", "n"), [(10, 100), (10, 1000), (4, 200), (2, 500)])
def test_guesses_hardly_reach_further(classes: int, n: int) -> None:
    limit = guessed(classes, n)
    assert limit == pytest.approx(1 / classes + 2 * math.sqrt((1 / classes) * (1 - 1 / classes) / n), abs=1e-12)
    assert at_least(math.floor(limit * n) + 1, n, 1 / classes) < 0.05
    assert at_least(math.floor(0.9 * limit * n), n, 1 / classes) > 0.01


def test_few_samples_tell_nothing_of_guesses() -> None:
    assert guessed(10, 99) == 1.0


def test_far_below_is_three_errors_of_the_difference() -> None:
    n = 10_000
    error = math.sqrt(2 * 0.25 / n)
    assert not far_below(0.5, 0.5 + 2.9 * error, n)
    assert far_below(0.5, 0.5 + 3.1 * error, n)
    assert not far_below(0.6, 0.5, n), "only below"
    assert not far_below(0.5, 0.5, n)


@pytest.mark.parametrize(
    ("low", "high", "n", "far"), [(0.0, 1.0, 1, False), (0.0, 1.0, 30, True), (0.0, 0.0, 9, False)]
)
def test_few_samples_are_told_apart_only_if_they_differ_much(low: float, high: float, n: int, far: bool) -> None:
    assert far_below(low, high, n) is far
