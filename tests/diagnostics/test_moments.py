"""Trace and spread of eigenvalues from products: exact where they say so, unbiased, with honest error bars."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import pytest
import torch
from curvature_cases import symmetric
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.diagnostics.estimate import Estimate, dots, mean_of, within
from flatrock.diagnostics.moments import Moments, known_moments, moments, products, with_trace_of

SIZE = 120
# A few large eigenvalues above many small ones of both signs, as Hessians of classifiers have them.
VALUES = torch.cat([torch.tensor([40.0, 25.0, 12.0, 6.0]), torch.linspace(-0.3, 0.6, SIZE - 4)])
MATRIX = symmetric(VALUES)
TRACE, SQUARE = float(VALUES.sum()), float(VALUES.square().sum())
SPREAD = float(VALUES.std(correction=0))


class Counted:
    """A matrix that counts the columns it was multiplied with."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.columns = matrix, 0
        self.shape, self.dtype, self.device = matrix.shape, matrix.dtype, matrix.device

    def __matmul__(self, columns: Tensor) -> Tensor:
        self.columns += columns.shape[1]
        return self.matrix @ columns


@functools.cache
def many(sketch: int, probes: int, seeds: int = 300) -> list[Moments]:
    return [moments(MATRIX, sketch=sketch, probes=probes, seed=Seed(s)) for s in range(seeds)]


@pytest.mark.parametrize(("sketch", "probes"), [(0, 36), (12, 12)])
def test_the_mean_over_seeds_is_the_truth(sketch: int, probes: int) -> None:
    found = many(sketch, probes)
    for name, truth in (("trace", TRACE), ("square", SQUARE)):
        values = torch.tensor([getattr(m, name).value for m in found], dtype=torch.float64)
        assert abs(float(values.mean()) - truth) < 3.5 * float(values.std()) / len(found) ** 0.5


def coverage(found: list[Moments], name: str, truth: float, level: float) -> float:
    """How often the interval of this level holds the truth."""
    intervals = [getattr(m, name).interval(level) for m in found]
    return sum(low <= truth <= high for low, high in intervals) / len(intervals)


# Three binomial standard errors of 300 seeds.
@pytest.mark.parametrize(("level", "slack"), [(0.68, 0.081), (0.95, 0.038)])
@pytest.mark.parametrize(("sketch", "probes"), [(0, 36), (12, 12), (4, 8)])
def test_intervals_of_the_trace_hold_the_truth_as_often_as_they_say(
    sketch: int, probes: int, level: float, slack: float
) -> None:
    assert abs(coverage(many(sketch, probes), "trace", TRACE, level) - level) <= slack


@pytest.mark.parametrize("name", ["square", "spread"])
def test_intervals_of_squares_are_a_little_short_where_large_eigenvalues_are_left_to_chance(name: str) -> None:
    """Draws of a sum of squares are skewed, which Student's t does not know."""
    truth = {"square": SQUARE, "spread": SPREAD}[name]
    shares = {way: coverage(many(*way), name, truth, 0.95) for way in ((0, 36), (12, 12), (4, 8))}
    assert 0.90 <= shares[0, 36] <= 0.98
    assert 0.90 <= shares[12, 12] <= 0.98  # what is left after the sketch is many and small
    assert 0.80 <= shares[4, 8] <= 0.95  # as many vectors as there are large eigenvalues: a part of them is left


def test_a_sketch_takes_the_large_eigenvalues_out_of_the_error() -> None:
    plain, sketched = many(0, 36, 60), many(12, 12, 60)
    for name in ("trace", "square", "spread"):
        errors = [torch.tensor([getattr(m, name).error for m in found]).mean() for found in (plain, sketched)]
        assert errors[1] < errors[0] / 4, name


def test_the_error_of_hutchinson_is_that_of_theory() -> None:
    theory = (2 * (SQUARE - float(MATRIX.diagonal().square().sum())) / 50) ** 0.5
    errors = [m.trace.error for m in many(0, 50, 60)]
    assert sum(errors) / len(errors) == pytest.approx(theory, rel=0.05)


@pytest.mark.parametrize("size", [1, 5, 30])
def test_a_matrix_no_larger_than_the_products_is_exact(size: int) -> None:
    values = torch.linspace(-1, 3, size) if size > 1 else torch.tensor([2.0])
    operator = Counted(symmetric(values))
    found = moments(operator, sketch=10, probes=10, seed=Seed(0))
    assert operator.columns == size == products(size, sketch=10, probes=10)
    assert (found.trace.draws, found.square.draws, found.spread.error) == (0, 0, 0)
    assert found.trace.value == pytest.approx(float(values.double().sum()), rel=1e-12)
    assert found.square.value == pytest.approx(float(values.double().square().sum()), rel=1e-12)
    assert found.spread.value == pytest.approx(float(values.double().std(correction=0)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("sketch", "probes"), [(0, 9), (7, 5)])
def test_it_makes_as_many_products_as_announced(sketch: int, probes: int) -> None:
    operator = Counted(MATRIX)
    moments(operator, sketch=sketch, probes=probes, seed=Seed(0))
    assert operator.columns == products(SIZE, sketch=sketch, probes=probes) == 2 * sketch + probes


def test_the_error_of_a_spread_from_blocks_is_that_of_its_parts() -> None:
    """The trace and the sum of squares move on their own: d spread = d square / 2ns - trace d trace / n^2 s."""
    whole = Moments(5, Estimate(7.0, 1.0, 8), Estimate(20.0, 0.3, 8), Estimate(1.4, 0.1, 8))
    parts = [
        dataclasses.replace(whole, count=n, trace=Estimate(t, e, 8)) for n, t, e in ((2, 1.0, 0.06), (3, 2.0, 0.08))
    ]
    found = with_trace_of(whole, parts)
    assert found.trace == Estimate(3.0, pytest.approx(0.1), 8)
    spread = math.sqrt(20 / 5 - (3 / 5) ** 2)
    assert found.spread.value == pytest.approx(spread)
    assert found.spread.error == pytest.approx(math.hypot(0.3 / (2 * 5 * spread), 3 * 0.1 / (25 * spread)))


def test_a_trace_block_by_block_is_more_certain() -> None:
    """Two blocks that are strongly coupled: the coupling is in the spread, and not in the trace."""
    gen = Seed(2).generator()
    coupling = 3 * torch.randn(60, 60, generator=gen, dtype=torch.float64)
    blocks = [symmetric(torch.linspace(0, 1, 60), seed=s) for s in (1, 2)]
    matrix = torch.cat([torch.cat([blocks[0], coupling], 1), torch.cat([coupling.mT, blocks[1]], 1)])
    whole = moments(matrix, sketch=8, probes=8, seed=Seed(0))
    parts = [moments(b, sketch=8, probes=8, seed=Seed(s)) for s, b in enumerate(blocks)]
    found = with_trace_of(whole, parts)
    assert whole.trace.error > 50 * found.trace.error
    low, high = found.trace.interval()
    assert low <= 60 <= high
    assert found.trace.value == sum(p.trace.value for p in parts)
    assert found.trace.error == pytest.approx(sum(p.trace.error**2 for p in parts) ** 0.5)
    assert found.square == whole.square
    assert found.spread.value == pytest.approx((found.square.value / 120 - (found.trace.value / 120) ** 2) ** 0.5)
    exact = with_trace_of(known_moments(4, 1.0, 5.0), [known_moments(2, 1.5, 2.0), known_moments(2, 0.5, 2.0)])
    assert exact == known_moments(4, 2.0, 5.0)


def test_a_matrix_of_low_rank_leaves_nothing_to_estimate() -> None:
    values = torch.zeros(SIZE)
    values[:5] = torch.tensor([3.0, 2.0, 1.0, -1.0, 0.5])
    found = moments(symmetric(values), sketch=8, probes=4, seed=Seed(1))
    assert found.trace.value == pytest.approx(5.5, rel=1e-12)
    assert found.square.value == pytest.approx(15.25, rel=1e-12)
    assert found.trace.error < 1e-12


def test_hutch_and_curvlinops_agree() -> None:
    from curvlinops import hutchpp_trace

    from flatrock.core.rng import kept_global_rng

    with kept_global_rng(seed=Seed(0)):
        theirs = torch.stack([hutchpp_trace(MATRIX, 36) for _ in range(200)])
    ours = torch.tensor([m.trace.value for m in many(12, 12, 200)], dtype=torch.float64)
    assert float((theirs.mean() - ours.mean()).abs()) < 4 * float((theirs.var() + ours.var()).sqrt()) / 200**0.5
    assert float(theirs.std()) == pytest.approx(float(ours.std()), rel=0.2)


def test_the_same_seed_gives_the_same_numbers() -> None:
    one, two, other = (moments(MATRIX, sketch=6, probes=6, seed=Seed(s)) for s in (1, 1, 2))
    assert one == two
    assert one.trace != other.trace


def test_single_precision_is_summed_in_double() -> None:
    size = 100_000
    ones = torch.full((size, 3), 1.1, dtype=torch.float32)
    assert dots(ones, ones).tolist() == pytest.approx([size * float(ones[0, 0].double() ** 2)] * 3, rel=1e-12)


@pytest.mark.parametrize(("probes", "sketch"), [(1, 4), (0, 0), (4, -1)])
def test_too_few_probes_are_refused(probes: int, sketch: int) -> None:
    with pytest.raises(ConfigError, match=r"must be a whole number >= [02]"):
        moments(MATRIX, probes=probes, sketch=sketch, seed=Seed(0))


def test_estimates_say_how_sure_they_are() -> None:
    draws = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = mean_of(draws, above=10)
    assert found == Estimate(12.5, pytest.approx((5 / 3) ** 0.5 / 2), 4)
    low, high = found.interval(0.95)
    assert (low + high) / 2 == 12.5
    assert high - 12.5 == pytest.approx(3.182446 * found.error, rel=1e-6)  # Student's t, 3 degrees of freedom
    assert Estimate(2.0).interval() == (2.0, 2.0)
    assert str(Estimate(2.0)) == "2"
    assert str(found) == "12.50 ± 0.65"


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (95.36, 10.2, "95 ± 10"),
        (0.20021, 0.0103, "0.200 ± 0.010"),
        (-0.459, 0.5, "-0.46 ± 0.50"),
        (4.95044, 6e-7, "4.95"),
        (0.0, 0.0, "0"),
        (123456.0, 2345.0, "1.23e+05 ± 2.3e+03"),
        (3e-9, 1e-9, "3e-09 ± 1e-09"),
    ],
)
def test_as_many_digits_as_the_error_allows(value: float, error: float, text: str) -> None:
    assert within(value, error) == text


def test_moments_survive_json() -> None:
    for found in (known_moments(4, 2.0, 3.0), moments(MATRIX, sketch=3, probes=4, seed=Seed(0))):
        assert Moments.from_dict(json.loads(json.dumps(dataclasses.asdict(found)))) == found
