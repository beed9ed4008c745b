"""Moves onto a hyperplane inside the box, against a linear program, an exhaustive search and the official code."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from pyautoattack.fab_projections import projection_l2, projection_linf
from scipy.optimize import linprog
from torch import Tensor

from flatrock.attacks.hyperplane import close_gap
from flatrock.core.rng import Seed
from flatrock.core.threat import L2, Linf

NORMS = ("linf", "l2")
PEERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"linf": projection_linf, "l2": projection_l2}


def project(points: Tensor, w: Tensor, b: Tensor, norm: str) -> Tensor:
    return close_gap(points, w, (w * points).sum(1) - b, norm)


def size(d: Tensor, norm: str) -> Tensor:
    return Linf(0).size(d) if norm == "linf" else L2(0).size(d)


def planes(dimension: int, n: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Points that crowd the faces of the box, some coordinates without weight, planes that mostly meet the box."""
    gen = Seed(seed).child("planes", dimension).generator()

    def uniform() -> Tensor:
        return torch.rand(n, dimension, generator=gen, dtype=torch.float64)

    points = ((uniform() - 1 / 3) * 3).clamp(0, 1)
    w = torch.randn(n, dimension, generator=gen, dtype=torch.float64) * (uniform() > 0.2)
    b = (w * uniform()).sum(1) + 0.3 * torch.randn(n, generator=gen, dtype=torch.float64)
    return points.to(dtype), w.to(dtype), b.to(dtype)


def reach(points: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Whether some point of the box lies on the plane."""
    return (w.clamp(max=0).sum(1) <= b) & (b <= w.clamp(min=0).sum(1))


def missed_by(points: Tensor, w: Tensor, b: Tensor, d: Tensor) -> Tensor:
    return ((w * (points + d)).sum(1) - b).abs()


def linear_program(x: Tensor, w: Tensor, b: Tensor) -> float:
    """min t over (d, t): -t <= d_i <= t, <w, x + d> = b, 0 <= x + d <= 1."""
    n = len(x)
    eye, one = np.eye(n), np.ones((n, 1))
    solved = linprog(
        np.r_[np.zeros(n), 1.0],
        A_ub=np.block([[eye, -one], [-eye, -one]]),
        b_ub=np.zeros(2 * n),
        A_eq=np.r_[w.numpy(), 0.0][None],
        b_eq=[float(b - w @ x)],
        bounds=[*((-v, 1 - v) for v in x.tolist()), (0, None)],
    )
    assert solved.success
    return float(solved.fun)


def exhaustive(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Every way to hold some coordinates at a face; the others move along w. The shortest that stays in the box."""
    best, shortest = torch.zeros_like(x), np.inf
    for held in product((0.0, 1.0, None), repeat=len(x)):
        free = torch.tensor([h is None for h in held])
        d = torch.tensor([0.0 if h is None else h for h in held], dtype=x.dtype) - x
        d[free] = 0
        weight = float(w[free].square().sum())
        gap = float(b - w @ (x + d))
        if weight > 0:
            d[free] = gap / weight * w[free]
        elif abs(gap) > 1e-12:
            continue
        inside = bool((x + d >= -1e-12).all()) and bool((x + d <= 1 + 1e-12).all())
        if inside and float(d.norm()) < shortest:
            best, shortest = d, float(d.norm())
    return best


@pytest.mark.parametrize("dimension", [1, 2, 7, 30])
def test_linf_moves_are_as_short_as_the_linear_program_says(dimension: int) -> None:
    points, w, b = planes(dimension, 25)
    d = project(points, w, b, "linf")
    ok = reach(points, w, b)
    assert int(ok.sum()) >= 5
    assert float(missed_by(points, w, b, d)[ok].max()) < 1e-12
    for i in ok.nonzero().squeeze(1).tolist():
        assert float(d[i].abs().max()) == pytest.approx(linear_program(points[i], w[i], b[i]), rel=0, abs=1e-8)


@pytest.mark.parametrize("dimension", [1, 2, 3, 5])
def test_l2_moves_are_those_of_an_exhaustive_search(dimension: int) -> None:
    points, w, b = planes(dimension, 20)
    d = project(points, w, b, "l2")
    ok = reach(points, w, b)
    assert int(ok.sum()) >= 5
    for i in ok.nonzero().squeeze(1).tolist():
        torch.testing.assert_close(d[i], exhaustive(points[i], w[i], b[i]), rtol=0, atol=1e-8)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dimension", [1, 2, 20, 300, 3072])
def test_moves_are_those_of_the_official_code(dimension: int, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # it casts to float32 here and there
    points, w, b = planes(dimension, 20)
    torch.testing.assert_close(project(points, w, b, norm), PEERS[norm](points, w, b), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dimension", [3, 50, 3072])
def test_moves_reach_the_plane_and_stay_in_the_box(dimension: int, dtype: torch.dtype, norm: str) -> None:
    points, w, b = planes(dimension, 40, dtype=dtype)
    d = project(points, w, b, norm)
    assert d.dtype == dtype
    there = points + d
    rounding = torch.finfo(dtype).eps
    assert float(there.min()) >= -rounding
    assert float(there.max()) <= 1 + rounding
    ok = reach(points.double(), w.double(), b.double())
    wide = missed_by(points.double(), w.double(), b.double(), d.double()) / w.double().abs().sum(1).clamp_min(1e-30)
    assert float(wide[ok].max()) < 4 * rounding


@pytest.mark.parametrize("norm", NORMS)
def test_without_the_box_in_the_way_the_move_has_a_closed_form(norm: str) -> None:
    gen = Seed(5).generator()
    points = 0.4 + 0.2 * torch.rand(30, 10, generator=gen, dtype=torch.float64)
    w = torch.randn(30, 10, generator=gen, dtype=torch.float64)
    c = 0.01 * torch.randn(30, generator=gen, dtype=torch.float64)
    d = project(points, w, (w * points).sum(1) - c, norm)
    step = w.sign() / w.abs().sum(1, keepdim=True) if norm == "linf" else w / w.square().sum(1, keepdim=True)
    torch.testing.assert_close(d, -c[:, None] * step, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(close_gap(points, w, c, norm), d, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm", NORMS)
def test_a_plane_out_of_reach_leads_to_the_nearest_corner(norm: str) -> None:
    points, w, _ = planes(6, 40)
    for side in (1.0, -1.0):
        d = project(points, w, side * (w.abs().sum(1) + 1), norm)
        corner = torch.where(w == 0, points, ((side * w.sign()) + 1) / 2)
        assert torch.equal((points + d).round(decimals=12), corner.round(decimals=12))


@pytest.mark.parametrize("norm", NORMS)
def test_coordinates_without_weight_do_not_move(norm: str) -> None:
    points, w, b = planes(12, 60)
    d = project(points, w, b, norm)
    assert int((w == 0).sum()) > 50
    assert not bool(d[w == 0].any())
    assert bool(d[w != 0].any())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_weight_at_all_means_no_move(dtype: torch.dtype, norm: str) -> None:
    points = planes(4, 3, dtype=dtype)[0]
    b = torch.tensor([0.0, 1.0, -1e30], dtype=dtype)
    assert torch.equal(project(points, torch.zeros_like(points), b, norm), torch.zeros_like(points))


@pytest.mark.parametrize("norm", NORMS)
def test_a_point_on_the_plane_stays(norm: str) -> None:
    points, w, _ = planes(8, 20)
    assert not bool(close_gap(points, w, torch.zeros(20, dtype=torch.float64), norm).any())


@pytest.mark.parametrize("norm", NORMS)
def test_a_corner_that_must_be_left_and_one_that_must_be_kept(norm: str) -> None:
    """At the origin only upward moves exist: the coordinate that would have to fall is stuck."""
    points, w = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    up = project(points, w, torch.tensor([0.5], dtype=torch.float64), norm)
    down = project(points, w, torch.tensor([-0.5], dtype=torch.float64), norm)
    torch.testing.assert_close(up, torch.tensor([[0.5, 0.0]], dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(down, torch.tensor([[0.0, 0.5]], dtype=torch.float64), rtol=0, atol=1e-15)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_the_length_of_the_normal_does_not_matter(scale: float, norm: str) -> None:
    """Gradients of a saturated network are tiny; their squares vanish in float32."""
    points, w, b = planes(20, 30, dtype=torch.float32)
    gap = (w * points).sum(1) - b
    torch.testing.assert_close(
        close_gap(points, scale * w, scale * gap, norm), close_gap(points, w, gap, norm), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("norm", NORMS)
def test_weights_of_very_different_size_in_float32(norm: str) -> None:
    points = torch.full((1, 3), 0.5)
    w = torch.tensor([[1.0, 1e-25, 1e-42]])
    near = close_gap(points, w, torch.tensor([0.1]), norm)
    torch.testing.assert_close(near[:, 0], torch.tensor([-0.1]))
    far = close_gap(points, w, torch.tensor([2.0]), norm)
    assert far[0].tolist() == [-0.5, -0.5, -0.5]


@pytest.mark.parametrize("norm", NORMS)
def test_rows_do_not_know_of_each_other(norm: str) -> None:
    points, w, b = planes(15, 12)
    whole = project(points, w, b, norm)
    for i in range(12):
        torch.testing.assert_close(project(points[i : i + 1], w[i : i + 1], b[i : i + 1], norm)[0], whole[i])
    assert project(points[:0], w[:0], b[:0], norm).shape == (0, 15)


@pytest.mark.parametrize("norm", NORMS)
def test_no_other_way_is_shorter(norm: str) -> None:
    """Random points of the box on the same plane, found by mixing two points on its two sides."""
    points, w, b = planes(10, 40, seed=2)
    ok = reach(points, w, b)
    points, w, b = points[ok], w[ok], b[ok]
    d = project(points, w, b, norm)
    gen = Seed(9).generator()
    tried = 0
    for _ in range(200):
        one, two = (torch.rand(points.shape, generator=gen, dtype=torch.float64) for _ in range(2))
        f, g = (w * one).sum(1) - b, (w * two).sum(1) - b
        mixed = one + (f / (f - g))[:, None] * (two - one)
        across = f * g < 0
        tried += int(across.sum())
        assert bool((size(d, norm) <= size(mixed - points, norm) + 1e-12)[across].all())
    assert tried > 500
