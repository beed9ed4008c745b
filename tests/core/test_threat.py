"""The geometry of the two balls: projection, steepest ascent, size, sampling, and radii that are refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatrock.core.errors import ThreatError
from flatrock.core.rng import Seed
from flatrock.core.threat import L2, THREATS, Linf, Threat, rows

BALLS = [Linf(0.1), Linf(8 / 255), L2(0.5), L2(128 / 255), L2(3.0)]
SHAPES = [(6, 5), (6, 3, 4, 4)]


def numbers(shape: tuple[int, ...], name: str = "numbers") -> Tensor:
    return torch.randn(shape, generator=Seed(0).child(name).generator(), dtype=torch.float64)


def points_inside(threat: Threat, shape: tuple[int, ...], count: int) -> list[Tensor]:
    like = torch.zeros(shape, dtype=torch.float64)
    ids = torch.arange(shape[0])
    return [threat.sample(like, Seed(1).child("q", i).samples(ids)) for i in range(count)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threat", BALLS)
def test_projection_lands_in_the_ball_and_is_idempotent(threat: Threat, shape: tuple[int, ...]) -> None:
    once = threat.project(3 * threat.eps * numbers(shape))
    assert (threat.size(once) <= threat.eps * (1 + 1e-12)).all()
    torch.testing.assert_close(threat.project(once), once, rtol=1e-15, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threat", BALLS)
def test_projection_is_the_nearest_point(threat: Threat, shape: tuple[int, ...]) -> None:
    """p is the nearest point of a convex set to d exactly when <d - p, q - p> <= 0 for every q of the set."""
    d = 3 * threat.eps * numbers(shape)
    p = threat.project(d)
    for q in points_inside(threat, shape, 100):
        assert (((d - p) * (q - p)).flatten(1).sum(1) <= 1e-12).all()


@pytest.mark.parametrize("threat", BALLS)
def test_points_inside_are_left_alone_bit_for_bit(threat: Threat) -> None:
    for q in points_inside(threat, (6, 3, 4, 4), 5):
        assert torch.equal(threat.project(q), q)


@pytest.mark.parametrize("threat", [Linf(0.0), L2(0.0)])
def test_radius_zero_projects_everything_to_zero(threat: Threat) -> None:
    assert torch.equal(threat.project(numbers((6, 5))), torch.zeros(6, 5, dtype=torch.float64))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threat", [Linf(1.0), L2(1.0)])
def test_ascent_maximises_the_inner_product_over_the_unit_ball(threat: Threat, shape: tuple[int, ...]) -> None:
    g = numbers(shape)
    d = threat.ascent(g)
    gained = (g * d).flatten(1).sum(1)
    torch.testing.assert_close(threat.size(d), torch.ones(6, dtype=torch.float64))
    dual = g.flatten(1).abs().sum(1) if threat.norm == "linf" else g.flatten(1).norm(dim=1)
    torch.testing.assert_close(gained, dual)
    for q in points_inside(threat, shape, 50):
        assert ((g * q).flatten(1).sum(1) <= gained).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.1)])
def test_zero_gradient_is_a_zero_step(threat: Threat, dtype: torch.dtype) -> None:
    g = torch.zeros(3, 2, 2, dtype=dtype)
    g[1] = 1
    d = threat.ascent(g)
    assert torch.equal(d[[0, 2]], torch.zeros(2, 2, 2, dtype=dtype))
    assert float(threat.size(d)[1]) == pytest.approx(1)


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_tiny_and_huge_gradients_still_give_a_unit_step(scale: float) -> None:
    """The squares of 1e-30 vanish in float32, and those of 1e30 overflow; the direction must not."""
    g = torch.tensor([[3.0, -4.0]]) * scale
    torch.testing.assert_close(L2(0.1).ascent(g).norm(), torch.tensor(1.0))
    assert torch.equal(L2(0.1).ascent(g).sign(), torch.tensor([[1.0, -1.0]]))
    if scale > 1e-38:
        torch.testing.assert_close(L2(0.1).ascent(g), torch.tensor([[0.6, -0.8]]))
    assert torch.equal(Linf(0.1).ascent(g), torch.tensor([[1.0, -1.0]]))


def test_size_is_the_norm_of_each_row() -> None:
    d = torch.tensor([[[3.0, -4.0]], [[0.0, 0.0]]])
    assert Linf(0.1).size(d).tolist() == [4, 0]
    assert L2(0.1).size(d).tolist() == [5, 0]


@pytest.mark.parametrize("threat", BALLS)
def test_samples_lie_in_the_ball_and_differ_between_samples_and_names(threat: Threat) -> None:
    like = torch.zeros(500, 3, 4, 4)
    gen = Seed(5).samples(torch.arange(500))
    first, second = threat.sample(like, gen.child(0)), threat.sample(like, gen.child(1))
    assert (threat.size(first) <= threat.eps * (1 + 1e-6)).all()
    assert torch.equal(first, threat.sample(like, gen.child(0)))
    assert not torch.equal(first, second)
    assert len(torch.unique(first.flatten(1), dim=0)) == 500


def test_linf_samples_fill_the_cube() -> None:
    d = Linf(0.25).sample(torch.zeros(2000, 4, dtype=torch.float64), Seed(6).samples(torch.arange(2000)))
    assert float(d.mean()) == pytest.approx(0, abs=4 * 0.25 / math.sqrt(3 * 8000))
    assert float(d.min()) < -0.249
    assert float(d.max()) > 0.249


def test_l2_samples_have_a_uniform_radius_and_no_preferred_direction() -> None:
    d = L2(2.0).sample(torch.zeros(4000, 3, dtype=torch.float64), Seed(7).samples(torch.arange(4000)))
    radius = d.norm(dim=1) / 2
    assert float(radius.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 * 4000))
    assert float(radius.var()) == pytest.approx(1 / 12, rel=0.1)
    direction = d / d.norm(dim=1, keepdim=True)
    assert float(direction.mean(0).abs().max()) < 4 / math.sqrt(3 * 4000)


@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.1)])
def test_empty_batches_stay_empty(threat: Threat) -> None:
    empty = torch.zeros(0, 3, 4, 4)
    assert threat.project(empty).shape == empty.shape
    assert threat.ascent(empty).shape == empty.shape
    assert threat.size(empty).shape == (0,)
    assert threat.sample(empty, Seed(0).samples(torch.arange(0))).shape == empty.shape


def test_default_steps_are_the_fields() -> None:
    assert Linf(8 / 255).default_step == pytest.approx(2 / 255)
    assert L2(128 / 255).default_step == pytest.approx(15 / 255)


@pytest.mark.parametrize("kind", [Linf, L2])
@pytest.mark.parametrize("eps", [-1e-9, -1, math.nan, math.inf, -math.inf])
def test_radius_out_of_range_is_refused(kind: type[Linf] | type[L2], eps: float) -> None:
    with pytest.raises(ThreatError, match=r"eps must lie in \[0, .*got .*pixel units"):
        kind(eps)


@pytest.mark.parametrize("kind", [Linf, L2])
@pytest.mark.parametrize("eps", [True, False, None, [0.1], "", "eight", "8/255/2", "1/0", "nan", "8,5", "True"])
def test_radius_that_is_no_number_is_refused(kind: type[Linf] | type[L2], eps: Any) -> None:
    with pytest.raises(ThreatError, match="eps must be a number, got"):
        kind(eps)


@pytest.mark.parametrize("kind", [Linf, L2])
@pytest.mark.parametrize(
    "eps",
    [
        np.float32(0.25),
        np.float64(0.25),
        np.float16(0.25),
        np.array(0.25),
        torch.tensor(0.25),
        torch.tensor(0.25).half(),
    ],
    ids=repr,
)
def test_numbers_of_numpy_and_torch_are_numbers(kind: type[Linf] | type[L2], eps: Any) -> None:
    threat = kind(eps)
    assert type(threat.eps) is float
    assert threat == kind(0.25)
    assert type(kind(np.int64(1)).eps) is type(kind(torch.tensor(0)).eps) is float  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "eps", [np.bool_(True), torch.tensor(True), np.complex64(0.1), torch.tensor([0.1]), np.array([0.1]), np.str_("one")]
)
def test_other_things_of_numpy_and_torch_are_not(eps: Any) -> None:
    with pytest.raises(ThreatError, match="eps must be a number, got"):
        Linf(eps)


@pytest.mark.parametrize(
    "eps", [np.float32(8), torch.tensor(8), np.float64("nan"), torch.tensor(-0.1), pytest.param(10**400, id="huge")]
)
def test_they_keep_to_the_range_too(eps: Any) -> None:
    with pytest.raises(ThreatError, match=r"eps must lie in \[0, 1\], got"):
        Linf(eps)


@pytest.mark.parametrize("kind", [Linf, L2])
@pytest.mark.parametrize(
    ("text", "eps"),
    [("8/255", 8 / 255), (" 128 / 255 ", 128 / 255), ("0.25", 0.25), ("5e-1", 0.5), ("0", 0.0), (np.str_("1/2"), 0.5)],
)
def test_a_radius_as_recipes_write_it(kind: type[Linf] | type[L2], text: str, eps: float) -> None:
    threat = kind(text)
    assert type(threat.eps) is float
    assert threat == kind(eps)
    assert hash(threat) == hash(kind(eps))
    assert dataclasses.replace(threat) == threat


def test_a_radius_in_text_keeps_to_the_range() -> None:
    with pytest.raises(ThreatError, match=r"Linf eps must lie in \[0, 1\], got '8'; .*write 8/255, not 8"):
        Linf("8")
    with pytest.raises(ThreatError, match=r"L2 eps must lie in \[0, 388\], got '-1/255'"):
        L2("-1/255")
    with pytest.raises(ThreatError, match=r"must be a number, got '1/0': '1/0' divides by zero"):
        L2("1/0")


def test_a_radius_in_grey_levels_is_refused_with_the_cure() -> None:
    with pytest.raises(ThreatError, match=r"got 8; .*write 8/255, not 8"):
        Linf(8)
    with pytest.raises(ThreatError, match="write 128/255, not 128"):
        L2(500)


def test_threats_are_values() -> None:
    assert Linf(0.1) == Linf(0.1)
    assert Linf(0.1) != L2(0.1)
    assert len({Linf(0.1), Linf(0.1), L2(0.1)}) == 2
    with pytest.raises(AttributeError):
        Linf(0.1).eps = 0.2  # type: ignore[misc]
    assert all(isinstance(kind(0.1), Threat) and kind.norm == name for name, kind in THREATS.items())


def test_rows_broadcast_over_any_rank() -> None:
    per_sample = torch.tensor([2.0, 3.0])
    for like in (torch.ones(2, 4), torch.ones(2, 3, 4, 4)):
        scaled = like * rows(per_sample, like)
        assert (scaled[0] == 2).all()
        assert (scaled[1] == 3).all()
