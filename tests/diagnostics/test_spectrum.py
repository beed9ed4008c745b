"""Lanczos and its quadrature on matrices whose eigenvalues are known."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from curvature_cases import symmetric
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.diagnostics.spectrum import Spectrum, lanczos, spectrum
from flatrock.flatness.full_trace import rademacher

SIZE = 200
VALUES = torch.cat([torch.tensor([-2.0, -1.5]), torch.linspace(-0.2, 0.4, SIZE - 6), torch.tensor([3.0, 5, 8, 9])])
MATRIX = symmetric(VALUES)


def start(size: int = SIZE, seed: int = 0) -> Tensor:
    return rademacher(torch.empty(size, dtype=torch.float64), Seed(seed))


def test_extreme_eigenvalues_of_a_known_matrix() -> None:
    found = lanczos(MATRIX, start(), steps=40)
    assert found.values[-4:].tolist() == pytest.approx([3, 5, 8, 9], rel=1e-10)
    assert found.values[:2].tolist() == pytest.approx([-2, -1.5], rel=1e-10)
    assert float(found.errors[-4:].max()) < 1e-6


def test_the_laplacian_of_a_path() -> None:
    """Eigenvalues 2 - 2 cos(pi k / (n + 1)), none of them well apart."""
    n = 60
    matrix = (
        2 * torch.eye(n, dtype=torch.float64) - torch.diag(torch.ones(n - 1), 1) - torch.diag(torch.ones(n - 1), -1)
    )
    truth = 2 - 2 * torch.cos(torch.pi * torch.arange(1, n + 1, dtype=torch.float64) / (n + 1))
    gen = Seed(1).generator()
    found = lanczos(matrix, torch.randn(n, generator=gen, dtype=torch.float64), steps=n)
    assert torch.allclose(found.values, truth, atol=1e-10, rtol=0)


@pytest.mark.parametrize("steps", [3, 10, 25])
def test_errors_bound_the_distance_to_an_eigenvalue(steps: int) -> None:
    found = lanczos(MATRIX, start(), steps=steps)
    nearest = (found.values[:, None] - VALUES.double()).abs().amin(1)
    assert bool((nearest <= found.errors + 1e-12).all())
    assert float(found.errors.max()) > 1e-3  # most have not converged, and say so


def test_errors_are_those_of_lanczos_and_not_of_the_products() -> None:
    """A product that is off by some symmetric noise moves eigenvalues, and no residual in these products shows it."""
    off = 1e-4 * symmetric(torch.linspace(-1, 1, SIZE), seed=9)
    found = lanczos(MATRIX + off, start(), steps=40)
    moved = float((found.values[-1] - 9).abs())
    assert float(found.errors[-1]) < moved < 1e-4
    single = lanczos(MATRIX.float(), start().float(), steps=40)
    assert single.errors[-1] == pytest.approx(torch.finfo(torch.float32).eps * 9, rel=1e-5)


def test_no_eigenvalue_comes_back_as_a_copy() -> None:
    """Without reorthogonalisation the large, early eigenvalues return several times within 200 steps."""
    found = lanczos(MATRIX.float(), start().float(), steps=SIZE)
    for value in (9.0, 8.0, 5.0, 3.0, -2.0, -1.5):
        assert int(((found.values - value).abs() < 1e-2).sum()) == 1
    assert float(found.values[-1]) == pytest.approx(9, rel=1e-5)


def test_it_stops_where_the_space_is_exhausted() -> None:
    values = torch.zeros(50)
    values[:3] = torch.tensor([1.0, 2.0, -1.0])
    found = lanczos(symmetric(values), start(50), steps=20)
    assert len(found.values) == 4  # three eigenvalues and zero
    assert found.values.tolist() == pytest.approx([-1, 0, 1, 2], abs=1e-10)
    assert float(found.errors.max()) < 1e-10


def test_a_zero_matrix_and_one_number() -> None:
    assert lanczos(torch.zeros(5, 5, dtype=torch.float64), start(5), steps=3).values.tolist() == [0]
    assert lanczos(torch.full((1, 1), 4.0, dtype=torch.float64), start(1), steps=3).values.tolist() == [4]


def test_the_quadrature_knows_the_moments() -> None:
    """m steps integrate polynomials up to degree 2 m - 1 as v^T H^k v does."""
    v = start()
    found = lanczos(MATRIX, v, steps=4)
    unit = v / v.norm()
    power = unit
    for k in range(8):
        assert float((found.weights * found.values**k).sum()) == pytest.approx(float(unit @ power), rel=1e-9), k
        power = MATRIX @ power


def test_density_is_a_density_with_the_right_shares() -> None:
    found = spectrum(MATRIX, runs=8, steps=40, top=4, seed=Seed(0))
    assert sum(found.weights) == pytest.approx(1, rel=1e-9)
    grid = torch.linspace(-4, 11, 6001, dtype=torch.float64)
    density = found.density(grid, width=0.05)
    step = float(grid[1] - grid[0])
    assert float(density.sum()) * step == pytest.approx(1, rel=1e-6)
    large = float(density[grid > 2].sum()) * step
    assert large == pytest.approx(4 / SIZE, rel=0.35)
    assert found.nodes[0] == pytest.approx(found.smallest[0][0])


def test_density_on_a_bent_axis_counts_the_same_eigenvalues() -> None:
    found = spectrum(MATRIX, runs=4, steps=40, top=4, seed=Seed(0))
    bent = torch.linspace(-8, 8, 8001, dtype=torch.float64)
    density = found.density(bent, width=0.05, bend=0.05)
    step = float(bent[1] - bent[0])
    assert float(density.sum()) * step == pytest.approx(1, rel=1e-6)
    share = float(density[bent > torch.asinh(torch.tensor(2 / 0.05))].sum()) * step
    above = sum(w for n, w in zip(found.nodes, found.weights, strict=True) if n > 2)
    assert share == pytest.approx(above, rel=1e-6)


def test_ends_are_largest_and_smallest_first() -> None:
    found = spectrum(MATRIX, runs=1, steps=40, top=4, seed=Seed(0))
    assert [v for v, _ in found.largest] == pytest.approx([9, 8, 5, 3], rel=1e-8)
    assert [v for v, _ in found.smallest[:2]] == pytest.approx([-2, -1.5], rel=1e-8)
    assert (found.runs, found.steps) == (1, 40)


def test_a_small_matrix_gives_what_it_has() -> None:
    found = spectrum(symmetric(torch.tensor([1.0, 2.0])), runs=2, steps=40, top=5, seed=Seed(0))
    assert [v for v, _ in found.largest] == pytest.approx([2, 1])
    assert found.steps == 2


def test_seeds_and_json() -> None:
    one, two, other = (spectrum(MATRIX, runs=2, steps=6, top=2, seed=Seed(s)) for s in (0, 0, 1))
    assert one == two != other
    assert Spectrum.from_dict(json.loads(json.dumps(dataclasses.asdict(one)))) == one


@pytest.mark.parametrize(
    ("part", "value", "fault"),
    [
        ("largest", [], "not those of the first Lanczos run"),
        ("smallest", [[-5.0, 0.1]], "not those of the first Lanczos run"),
        ("weights", [0.1], "do not belong to its nodes"),
        ("nodes", ["x"], "expected a finite number, got 'x'"),
        ("runs", 0, "expected a whole number >= 1, got 0"),
    ],
)
def test_parts_that_do_not_belong_together(part: str, value: object, fault: str) -> None:
    found = dataclasses.asdict(spectrum(MATRIX, runs=2, steps=6, top=2, seed=Seed(0)))
    with pytest.raises(ValueError, match=fault):
        Spectrum.from_dict({**found, part: value})
    with pytest.raises(ValueError, match="add up to 1"):
        Spectrum.from_dict({**found, "weights": [2 * w for w in found["weights"]]})


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"steps": 1}, "steps must be a whole number >= 2"),
        ({"runs": 0}, "runs must be a whole number >= 1"),
        ({"top": 0}, "top must be a whole number >= 1"),
        ({"steps": 7, "top": 4}, "7 Lanczos steps cannot give 4 eigenvalues at each end; use at least 8"),
    ],
)
def test_options_that_cannot_work(options: dict[str, int], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        spectrum(MATRIX, **{"runs": 1, "steps": 20, "top": 4, **options}, seed=Seed(0))


def test_infinite_entries_are_named() -> None:
    broken = MATRIX.clone()
    broken[0, 0] = torch.inf
    with pytest.raises(ConfigError, match="not finite"):
        spectrum(broken, runs=1, steps=10, top=2, seed=Seed(0))
