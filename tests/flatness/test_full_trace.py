"""The trace over all parameters against dense Hessians of small networks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from flatrock.core.hooks import Look, Moment
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.types import View, Views
from flatrock.flatness.full_trace import (
    check_higher_derivatives,
    exact_traces,
    hutchinson,
    rademacher,
)
from flatrock.flatness.trh import TrH
from flatrock.models.catalog import create_model
from flatrock.objectives.catalog import OBJECTIVES

OBJECTIVE_ROWS: list[tuple[str, dict[str, Any]]] = [
    ("standard", {}),
    ("at", {}),
    ("trades", {"beta": 4.0}),
    ("mart", {"beta": 5.0}),
    ("alp", {"pair": "probabilities"}),
]


def tiny(*, hidden: int = 5, classes: int = 3, in_place: bool = False, bias: bool = True) -> nn.Sequential:
    """3 inputs, two hidden layers; weights drawn large enough for curvature to show."""
    net = nn.Sequential(
        nn.Linear(3, hidden),
        nn.ReLU(inplace=in_place),
        nn.Linear(hidden, 4, bias=bias),
        nn.LeakyReLU(0.2),
        nn.Linear(4, classes),
    ).double()
    gen = Seed(7).child("tiny").generator()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.8 * torch.randn(p.shape, generator=gen, dtype=torch.float64))
    return net


def points(n: int = 6, *, classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    gen = Seed(8).child("points").generator()
    x = torch.rand(n, 3, generator=gen, dtype=torch.float64)
    x_adv = x + 0.4 * torch.randn(n, 3, generator=gen, dtype=torch.float64)
    return x, x_adv, torch.randint(classes, (n,), generator=gen)


def loss_of(net: nn.Module, name: str, options: Mapping[str, Any], batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, x_adv, y = batch
    views = Views(*(View(v, net(v)) for v in (x, x_adv)))
    return OBJECTIVES.make(name, **options).loss(views, y).total


def dense_hessian(total: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Row by row, from the graph of the loss."""
    tensors = list(parameters.values())
    flat = torch.cat([g.flatten() for g in torch.autograd.grad(total, tensors, create_graph=True)])
    rows = [torch.autograd.grad(g, tensors, retain_graph=True, materialize_grads=True) for g in flat]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def blocks(dense: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Diagonal blocks by parameter."""
    ends = torch.tensor([p.numel() for p in parameters.values()]).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return {n: dense[a:b, a:b] for n, a, b in zip(parameters, starts, ends, strict=True)}


# Exact


@pytest.mark.parametrize(("name", "options"), OBJECTIVE_ROWS)
@pytest.mark.parametrize("in_place", [False, True])
def test_exact_traces_are_those_of_the_dense_hessian(name: str, options: dict[str, Any], in_place: bool) -> None:
    net, batch = tiny(in_place=in_place, bias=not in_place), points()
    parameters = dict(net.named_parameters())
    x, x_adv, y = batch
    z, z_adv = net(x), net(x_adv)
    total = OBJECTIVES.make(name, **options).loss(Views(View(x, z), View(x_adv, z_adv)), y).total
    expected = {n: float(b.trace()) for n, b in blocks(dense_hessian(total, parameters), parameters).items()}
    got = exact_traces(net, total, [(x, z), (x_adv, z_adv)])
    assert {n: t.item() for n, t in got.items()} == pytest.approx(expected, rel=1e-10, abs=1e-13)


@pytest.mark.parametrize("gamma", [0.0, 0.7])
def test_the_pass_of_a_helper_counts(gamma: float) -> None:
    net, (x, x_adv, y) = tiny(), points()
    x_h = 2 * x_adv - x
    views = Views(*(View(v, net(v)) for v in (x, x_adv, x_h)), (y + 1) % 3)
    parts = OBJECTIVES.make("hat", gamma=gamma, helper="runs/some").loss(views, y)
    expected = dense_hessian(parts.total, dict(net.named_parameters())).trace()
    look = Look(net, x, x_adv, y, views, parts, Moment(1, 0, 0.0, Seed(0)), x_h)
    added = TrH(layers="full", clean="full").in_loss(look)
    assert added is not None
    torch.testing.assert_close(added.terms["trace"], expected, rtol=1e-10, atol=1e-12)


def test_exact_traces_can_be_differentiated() -> None:
    """Against central differences in every parameter."""
    net, batch = tiny(hidden=3), points(3)
    x, x_adv, y = batch
    objective = OBJECTIVES.make("trades")

    def trace(weights: dict[str, Tensor]) -> Tensor:
        for name, p in net.named_parameters():
            p.data = weights[name]
        z, z_adv = net(x), net(x_adv)
        total = objective.loss(Views(View(x, z), View(x_adv, z_adv)), y).total
        return torch.stack(list(exact_traces(net, total, [(x, z), (x_adv, z_adv)]).values())).sum()

    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    grads = torch.autograd.grad(trace(start), list(net.parameters()))
    for (name, w), grad in zip(start.items(), grads, strict=True):
        for i in range(0, w.numel(), 3):
            step = torch.zeros_like(w).flatten()
            step[i] = 1e-6
            up, down = ({**start, name: w + sign * step.reshape(w.shape)} for sign in (1, -1))
            slope = (trace(up) - trace(down)).item() / 2e-6
            assert float(grad.flatten()[i]) == pytest.approx(slope, rel=1e-5, abs=1e-6)


def test_exact_traces_leave_frozen_parameters_out() -> None:
    net, (x, _, y) = tiny(), points()
    net[0].requires_grad_(False)
    net[4].bias.requires_grad_(False)
    z = net(x)
    total = F.cross_entropy(z, y)
    trained = {n: p for n, p in net.named_parameters() if p.requires_grad}
    expected = {n: float(b.trace()) for n, b in blocks(dense_hessian(total, trained), trained).items()}
    assert {n: t.item() for n, t in exact_traces(net, total, [(x, z)]).items()} == pytest.approx(expected, rel=1e-10)


def test_a_pass_the_loss_does_not_use_changes_nothing() -> None:
    net, (x, x_adv, y) = tiny(), points()
    z, z_adv = net(x), net(x_adv)
    total = F.cross_entropy(z_adv, y)
    one, both = (exact_traces(net, total, p) for p in ([(x_adv, z_adv)], [(x, z), (x_adv, z_adv)]))
    assert {n: t.item() for n, t in both.items()} == pytest.approx({n: t.item() for n, t in one.items()}, rel=1e-13)


def test_a_network_that_blew_up_gives_nan_and_no_excuse() -> None:
    net, (x, _, y) = tiny(), points()
    with torch.no_grad():
        net[2].weight[0, 0] = torch.nan
    z = net(x)
    assert exact_traces(net, F.cross_entropy(z, y), [(x, z)])["4.weight"].isnan()


def test_a_single_linear_layer_has_the_closed_form() -> None:
    net, (x, _, y) = nn.Linear(3, 4).double(), points()
    z = net(x)
    got = exact_traces(net, F.cross_entropy(z, y), [(x, z)])
    spread = 1 - z.softmax(1).square().sum(1)
    assert got["weight"].item() == pytest.approx((x.square().sum(1) * spread).mean().item(), rel=1e-12)
    assert got["bias"].item() == pytest.approx(spread.mean().item(), rel=1e-12)


def test_the_moons_network_is_cheap_enough_to_train_with() -> None:
    net = create_model("moons_mlp", num_classes=2).train()
    x, y = torch.rand(128, 2), torch.arange(128) % 2
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        z = net(x)
        total = F.cross_entropy(z, y)
        torch.stack(list(exact_traces(net, total, [(x, z)]).values())).sum().backward()
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.05


def test_dropout_that_is_off_is_no_obstacle() -> None:
    net, (x, _, y) = nn.Sequential(tiny(), nn.Dropout(0.5)).double().eval(), points()
    z = net(x)
    total = F.cross_entropy(z, y)
    parameters = dict(net.named_parameters())
    expected = float(dense_hessian(total, parameters).trace())
    assert sum(t.item() for t in exact_traces(net, total, [(x, z)]).values()) == pytest.approx(expected, rel=1e-10)


# Hutchinson


def test_one_probe_is_its_quadratic_form() -> None:
    net = tiny()
    parameters = dict(net.named_parameters())
    total = loss_of(net, "mart", {}, points())
    dense = dense_hessian(total, parameters)
    v = torch.cat([rademacher(p, Seed(3).child("probe", 0, n)).flatten() for n, p in parameters.items()])
    assert hutchinson(total, parameters, seed=Seed(3)).item() == pytest.approx(float(v @ dense @ v), rel=1e-10)


def test_probes_have_the_mean_and_the_variance_of_rademacher_vectors() -> None:
    """A quadratic loss with a known Hessian, 4,000 probes; 2 (||H||_F^2 - sum_i H_ii^2), not 2 ||H||_F^2."""
    gen = Seed(2).child("quadratic").generator()
    root = torch.randn(6, 6, generator=gen, dtype=torch.float64)
    dense = root @ root.T
    v = rademacher(torch.zeros(4000, 6, dtype=torch.float64), Seed(0))
    forms = ((v @ dense) * v).sum(1)
    off_diagonal = 2 * (dense.square().sum() - dense.diagonal().square().sum())
    error = (off_diagonal / 4000).sqrt()
    assert abs(float(forms.mean() - dense.trace())) < 4 * float(error)
    assert float(forms.var()) == pytest.approx(float(off_diagonal), rel=0.1)
    assert float(forms.var()) < 0.8 * float(2 * dense.square().sum())


def test_many_probes_come_near_the_trace_of_a_network() -> None:
    net = tiny()
    parameters = dict(net.named_parameters())
    total = loss_of(net, "trades", {}, points())
    dense = dense_hessian(total, parameters)
    variance = 2 * (dense.square().sum() - dense.diagonal().square().sum())
    estimate = hutchinson(total, parameters, seed=Seed(0), probes=100)
    assert abs(float(estimate.detach() - dense.trace())) < 4 * float((variance / 100).sqrt())


def test_signs_are_signs_and_belong_to_the_seed() -> None:
    like = torch.zeros(50, 40)
    signs = rademacher(like, Seed(1))
    assert signs.shape == like.shape
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.1
    assert torch.equal(signs, rademacher(like, Seed(1)))
    assert not torch.equal(signs, rademacher(like, Seed(2)))
    assert torch.equal(signs.double(), rademacher(like.double(), Seed(1)))


@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 4), nn.BatchNorm1d(4).eval(), nn.GELU()])
def test_the_estimate_can_be_differentiated(layer: nn.Module) -> None:
    with kept_global_rng(seed=Seed(0)):
        net = nn.Sequential(nn.Linear(3, 4), layer, nn.Softplus(), nn.Linear(4, 3)).double()
    check_higher_derivatives(net)
    x, _, y = points()
    start = {n: p.detach().clone().requires_grad_(True) for n, p in net.named_parameters()}
    names = list(start)

    def estimate(*tensors: Tensor) -> Tensor:
        weights = dict(zip(names, tensors, strict=True))
        return hutchinson(F.cross_entropy(functional_call(net, weights, (x,)), y), weights, seed=Seed(4), probes=2)

    assert torch.autograd.gradcheck(estimate, tuple(start.values()))
