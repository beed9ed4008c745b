"""Rises of the loss along the worst weights, against what can be computed by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from curvature_cases import dense_hessian, dense_net, samples
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, ModelError
from flatrock.diagnostics.hessian import still
from flatrock.diagnostics.sharpness import AwpRise, LossSurface, SamRise, awp_rise, sam_rise, squared_norm


def surface(net: nn.Module, batch_size: int = 9) -> LossSurface:
    return LossSurface(net, *samples((3,), 3), batch_size=batch_size)


def shifted_loss(net: nn.Module, shift: dict[str, Tensor]) -> float:
    weights = {n: p.detach() + shift.get(n, 0) for n, p in net.named_parameters()}
    x, y = samples((3,), 3)
    return float(F.cross_entropy(torch.func.functional_call(net, weights, (x,)), y).detach())


def gradients(net: nn.Module) -> dict[str, Tensor]:
    x, y = samples((3,), 3)
    named = dict(net.named_parameters())
    return dict(zip(named, torch.autograd.grad(F.cross_entropy(net(x), y), list(named.values())), strict=True))


@pytest.mark.parametrize("batch_size", [1, 9, 24, 100])
def test_loss_and_gradient_over_batches_are_those_of_all_samples(batch_size: int) -> None:
    net = dense_net()
    found = surface(net, batch_size)
    value, slope = found.slope()
    assert value == pytest.approx(shifted_loss(net, {}), rel=1e-12)
    assert found.value() == pytest.approx(value, rel=1e-12)
    for name, g in gradients(net).items():
        assert torch.allclose(slope[name], g, rtol=1e-10, atol=1e-14)
    assert all(p.grad is None for p in net.parameters())


def test_one_awp_step_is_awps_own_shift() -> None:
    net, gamma = dense_net(), 0.03
    named = dict(net.named_parameters())
    moved = {n: gamma * named[n].norm() * g / g.norm() for n, g in gradients(net).items() if n.endswith("weight")}
    found = awp_rise(surface(net), gamma=gamma, steps=1)
    assert found == AwpRise(gamma, 1, pytest.approx(shifted_loss(net, moved) - shifted_loss(net, {}), rel=1e-9))
    assert found.rise is not None
    assert found.rise > 0


def test_more_awp_steps_find_no_less() -> None:
    net = dense_net(scale=2)
    rises = [awp_rise(surface(net), gamma=0.2, steps=s).rise for s in (1, 3, 10)]
    assert rises == sorted(rises)


@pytest.mark.parametrize(("steps", "top"), [(1, 0.3), (2, 0.3), (4, 0.0), (6, 0.0)])
def test_of_an_ascent_that_overshoots_the_highest_point_counts(steps: int, top: float) -> None:
    """log(1 + exp(5 cos w)) from w = 0.3 with gamma 4: to -0.9, which is lower, and back to the top in steps of 0.3."""

    class Hill(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1, bias=False).double()
            nn.init.constant_(self.fc.weight, 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.zeros_like(x), 5 * self.fc(x).cos()], 1)

    at = LossSurface(Hill(), torch.ones(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.int64), batch_size=2)
    height = [math.log1p(math.exp(5 * math.cos(w))) for w in (top, 0.3)]
    assert awp_rise(at, gamma=4, steps=steps).rise == pytest.approx(height[0] - height[1], abs=1e-12)


def test_the_awp_rise_of_a_layer_linear_in_its_weights_is_at_most_its_bound() -> None:
    """|L(w + v) - L(w)| <= sqrt(2) max_i ||x_i|| ||v||: the gradient of CE w.r.t. logits is no longer than sqrt(2)."""
    net = nn.Sequential(nn.Linear(3, 3, bias=False)).double()
    gamma = 0.5
    longest = float(samples((3,), 3)[0].norm(dim=1).max())
    rise = awp_rise(surface(net), gamma=gamma, steps=20).rise
    assert 0 < rise <= math.sqrt(2) * longest * gamma * float(next(net.parameters()).norm().detach())


def test_sam_is_one_step_of_length_rho() -> None:
    net, rho = dense_net(), 0.1
    x, y = samples((3,), 3)
    slope = gradients(net)
    flat = torch.cat([g.flatten() for g in slope.values()])
    moved = {n: rho * g / flat.norm() for n, g in slope.items()}
    dense = dense_hessian(net, x, y)
    found = sam_rise(surface(net), dense, rho=rho)
    assert found.rise == pytest.approx(shifted_loss(net, moved) - shifted_loss(net, {}), rel=1e-9)
    assert found.slope == pytest.approx(float(flat.norm()), rel=1e-10)
    bend = float(flat @ dense @ flat / flat.dot(flat))
    assert found.predicted == pytest.approx(rho * found.slope + rho**2 / 2 * bend, rel=1e-10)


def test_the_prediction_holds_for_small_steps_to_third_order() -> None:
    with torch.no_grad():
        net = nn.Sequential(nn.Linear(3, 6), nn.Softplus(), nn.Linear(6, 3)).double()
    x, y = samples((3,), 3)
    dense = dense_hessian(net, x, y)
    off = [abs((r := sam_rise(surface(net), dense, rho=rho)).rise - r.predicted) for rho in (0.1, 0.05)]
    assert off[0] < 1e-3
    assert off[0] / off[1] == pytest.approx(8, rel=0.2)


def test_nothing_moves_at_strength_zero() -> None:
    net = dense_net()
    assert awp_rise(surface(net), gamma=0, steps=3) == AwpRise(0, 3, 0.0)
    assert sam_rise(surface(net), torch.eye(86, dtype=torch.float64), rho=0).rise == 0


def test_a_flat_loss_has_no_rise() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return 0 * self.fc(x)

    net = Constant()
    assert sam_rise(surface(net), torch.eye(12, dtype=torch.float64), rho=1) == SamRise(1, 0, 0, 0)
    assert awp_rise(surface(net), gamma=0.1, steps=2).rise == 0


def test_a_loss_that_is_not_finite_is_no_flat_loss() -> None:
    """NaN compares as not larger: it must not end as a rise of 0."""
    net = dense_net().float()
    x, y = samples((3,), 3)
    here = LossSurface(net, x.float(), y, batch_size=24)

    def attack(model: nn.Module) -> Tensor:
        raise AssertionError("nothing to attack at weights without a loss")

    assert awp_rise(here, gamma=1e30, steps=3, attack=attack) == AwpRise(1e30, 3, None, None)
    found = sam_rise(here, torch.eye(86), rho=1e30)
    assert found.rise is None
    assert found.predicted is not None
    assert sam_rise(here, torch.eye(86), rho=1e300).predicted is None


def test_attacking_anew_happens_at_the_moved_weights_and_gives_them_back() -> None:
    net = dense_net()
    before = [p.detach().clone() for p in net.parameters()]
    x, y = samples((3,), 3)
    seen = []

    def attack(model: nn.Module) -> Tensor:
        seen.append([p.detach().clone() for p in model.parameters()])
        return (x + 0.1).clamp(0, 1)

    with still(net, x, y):
        found = awp_rise(surface(net), gamma=0.1, steps=2, attack=attack)
    assert len(seen) == 1
    assert not torch.equal(seen[0][0], before[0])
    assert torch.equal(seen[0][1], before[1])  # a bias, which AWP leaves alone
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    weights = dict(zip([n for n, _ in net.named_parameters()], seen[0], strict=True))
    there = float(F.cross_entropy(torch.func.functional_call(net, weights, ((x + 0.1).clamp(0, 1),)), y))
    assert found.attacked_anew == pytest.approx(there - shifted_loss(net, {}), rel=1e-9)


def test_bad_options_and_models() -> None:
    net = dense_net()
    with pytest.raises(ConfigError, match="gamma must be a number >= 0"):
        awp_rise(surface(net), gamma=-1, steps=1)
    with pytest.raises(ConfigError, match="awp_steps must be a whole number >= 1"):
        awp_rise(surface(net), gamma=1, steps=0)
    with pytest.raises(ConfigError, match="rho must be a number >= 0"):
        sam_rise(surface(net), torch.eye(86, dtype=torch.float64), rho=float("nan"))
    with pytest.raises(ModelError, match="no trainable parameter"):
        awp_rise(surface(nn.Flatten()), gamma=1, steps=1)


def test_norm_and_dicts() -> None:
    assert squared_norm({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor(2.0)}) == 29
    for value in (AwpRise(0.1, 2, 0.3, None), AwpRise(0.1, 2, None), SamRise(0.1, 0.2, 0.3, 0.4)):
        assert type(value).from_dict(dataclasses.asdict(value)) == value
