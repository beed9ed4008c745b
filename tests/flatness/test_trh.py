"""TrH as a method: what it adds to a loss, when, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.hooks import Look, Moment, Penalty
from flatrock.core.rng import Seed
from flatrock.core.types import Parts, View, Views
from flatrock.flatness.full_trace import exact_traces, hutchinson
from flatrock.flatness.traces import loss_trace
from flatrock.flatness.trh import TrH, schedule_factor, squared_norm
from flatrock.models.catalog import create_model
from flatrock.models.view import view
from flatrock.objectives.catalog import OBJECTIVES

FULL: dict[str, Any] = {"layers": "full", "clean": "full"}


def look(name: str = "trades", *, share: float = 0.5, step: int = 3, model: nn.Module | None = None) -> Look:
    model = model or create_model("moons_mlp", num_classes=2).double().train()
    gen = Seed(1).child("look").generator()
    x = torch.rand(8, 2, generator=gen, dtype=torch.float64)
    x_adv = x + 0.05 * torch.randn(8, 2, generator=gen, dtype=torch.float64)
    y = torch.randint(2, (8,), generator=gen)
    objective = OBJECTIVES.make(name)
    passes = {"clean": x, "adv": x_adv}
    views = Views(*(view(model, v) if k in objective.passes else None for k, v in passes.items()))
    return Look(model, x, x_adv, y, views, objective.loss(views, y), Moment(1, step, share, Seed(0)))


def penalty(method: TrH, seen: Look) -> Penalty:
    made = method.in_loss(seen)
    assert made is not None
    return made


def summed(parts: Parts, added: Penalty | None) -> Tensor:
    """The loss as the engine joins it."""
    if added is None:
        return parts.total
    return Parts({**parts.terms, **added.terms}, {**parts.weights, **added.weights}).total


# The schedule of the weight


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", (1, 1, 1, 1, 1, 1)),
        ("linear", (0, 0.099, 0.1, 0.499, 0.5, 1)),
        ("multistep", (0.01, 0.01, 0.1, 0.1, 1, 1)),
    ],
)
def test_schedules(schedule: str, factors: tuple[float, ...]) -> None:
    for share, factor in zip((0, 0.099, 0.1, 0.499, 0.5, 1), factors, strict=True):
        assert schedule_factor(schedule, share) == factor
        assert penalty(TrH(weight=0.2, schedule=schedule), look(share=share)).weights["trace"] == 0.2 * factor


def test_golden_schedules() -> None:
    assert [schedule_factor("multistep", share) for share in (0.05, 0.2, 0.7)] == [0.01, 0.1, 1.0]
    assert schedule_factor("linear", 0.25) == 0.25


# What it adds


@pytest.mark.parametrize("clean", ["stop", "full"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_top_layer_form_adds_the_closed_trace(clean: str, bias: bool) -> None:
    seen = look()
    made = penalty(TrH(weight=0.3, clean=clean, bias=bias), seen)
    expected = loss_trace(seen.parts, seen.views, seen.y, full=clean == "full", bias=bias)
    assert torch.equal(made.terms["trace"], expected)
    assert made.weights == {"trace": 0.3, "theta_sq": 0.0}
    assert made.label_factor == 1


def test_the_trace_is_differentiated_in_every_parameter_and_the_norm_only_if_it_counts() -> None:
    seen = look("at")
    made = penalty(TrH(weight=0.3), seen)
    grads = torch.autograd.grad(made.terms["trace"], list(seen.model.parameters()))
    assert all(bool((g != 0).any()) for g in grads)
    assert not made.terms["theta_sq"].requires_grad


def test_gamma_adds_the_squared_norm_of_all_parameters() -> None:
    seen = look()
    made = penalty(TrH(weight=0.3, gamma=0.01), seen)
    parameters = list(seen.model.parameters())
    expected = sum(float(p.detach().square().sum()) for p in parameters)
    assert made.terms["theta_sq"].item() == pytest.approx(expected, rel=1e-12)
    assert made.weights["theta_sq"] == 0.01
    grads = torch.autograd.grad(made.terms["theta_sq"], parameters)
    assert all(torch.allclose(g, 2 * p, rtol=1e-12) for g, p in zip(grads, parameters, strict=True))


def test_the_norm_of_zero_weights_has_gradient_zero() -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.bias.zero_()
    grads = torch.autograd.grad(squared_norm(net), list(net.parameters()))
    assert torch.allclose(grads[0], 2 * net.weight)
    assert torch.equal(grads[1], torch.zeros(2))


@pytest.mark.parametrize("options", [{}, FULL, {**FULL, "estimate": "hutchinson"}])
def test_a_weight_of_zero_for_now_leaves_the_loss_bit_identical(options: dict[str, Any]) -> None:
    seen, plain = look(share=0.0), look(share=0.0)
    made = penalty(TrH(weight=0.3, schedule="linear", **options), seen)
    assert not made.terms["trace"].requires_grad
    assert made.terms["trace"].item() == pytest.approx(
        penalty(TrH(weight=0.3, **options), plain).terms["trace"].item(), rel=1e-12
    )
    loss = summed(seen.parts, made)
    assert torch.equal(loss, plain.parts.total)
    ours, theirs = (
        torch.autograd.grad(total, list(where.model.parameters()))
        for total, where in ((loss, seen), (plain.parts.total, plain))
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", [{}, FULL])
def test_zero_strength_is_nothing(options: dict[str, Any]) -> None:
    method = TrH(weight=0.0, gamma=0.0, **options)
    assert method.in_loss(look()) is None
    assert method.passes(2, 10) == 0
    method.check(create_model("digits_cnn", seed=0))  # nothing to do, nothing to refuse


@pytest.mark.parametrize("name", ["standard", "at", "trades", "mart", "alp"])
def test_the_exact_trace_of_the_whole_network(name: str) -> None:
    seen = look(name)
    passes = [(x, v.logits) for x, v in ((seen.x, seen.views.clean), (seen.x_adv, seen.views.adv)) if v is not None]
    by_name = exact_traces(seen.model, seen.parts.total, passes)
    made = penalty(TrH(weight=0.3, **FULL), seen).terms["trace"]
    assert made.item() == pytest.approx(sum(t.item() for t in by_name.values()), rel=1e-12)
    top = loss_trace(seen.parts, seen.views, seen.y, full=True)
    assert by_name["head.weight"].item() == pytest.approx(top.item(), rel=1e-10)
    grads = torch.autograd.grad(made, list(seen.model.parameters()), materialize_grads=True)
    assert all(bool(torch.isfinite(g).all()) and bool((g != 0).any()) for g in grads)


def test_the_estimated_trace_draws_new_probes_every_step() -> None:
    method = TrH(weight=0.3, estimate="hutchinson", probes=2, **FULL)
    seen = look(step=3)
    first = penalty(method, seen).terms["trace"]
    weights = dict(seen.model.named_parameters())
    expected = hutchinson(seen.parts.total, weights, seed=Seed(0).child("trh", 3), probes=2)
    assert torch.equal(first, expected)
    assert torch.equal(first, penalty(method, look(step=3)).terms["trace"])
    assert not torch.equal(first, penalty(method, look(step=4)).terms["trace"])
    assert bool(torch.autograd.grad(first, seen.model.get_parameter("fc1.weight"))[0].any())


def test_the_penalty_makes_the_top_layer_flatter() -> None:
    """Ten small steps on the penalty alone."""
    seen = look("at")
    optimizer = torch.optim.SGD(seen.model.parameters(), lr=0.05)
    values = []
    for _ in range(10):
        again = view(seen.model, seen.x_adv)
        views = Views(None, View(again.features, again.logits))
        moved = Look(seen.model, seen.x, seen.x_adv, seen.y, views, seen.parts, seen.moment)
        trace = penalty(TrH(), moved).terms["trace"]
        values.append(trace.item())
        optimizer.zero_grad()
        trace.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.9 * values[0]


def test_no_pass_is_asked_for_and_the_full_forms_say_what_they_cost() -> None:
    assert TrH().needs == ()
    assert TrH().passes(2, 10) == 0
    exact, three = TrH(**FULL), TrH(estimate="hutchinson", probes=3, **FULL)
    assert exact.passes(2, 10) == 2 * exact.passes(1, 10) > 2
    assert three.passes(2, 10) == 3 * exact.passes(2, 10)


# Refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weight": -1.0}, "trh weight must be a number >= 0, got -1.0"),
        ({"gamma": float("nan")}, "trh gamma"),
        ({"schedule": "cosine"}, "unknown trh schedule 'cosine'; known: constant, linear, multistep"),
        ({"clean": "half"}, "unknown trh clean 'half'"),
        ({"layers": "all"}, "unknown trh layers 'all'"),
        ({"bias": 1}, "trh bias must be true or false, got 1"),
        ({**FULL, "estimate": "lanczos"}, "unknown trh estimate 'lanczos'"),
        ({**FULL, "estimate": "hutchinson", "probes": 0}, "trh probes must be a whole number >= 1, got 0"),
        ({"estimate": "hutchinson"}, "write layers: full"),
        ({**FULL, "probes": 4}, "probes: 4"),
        ({"layers": "full"}, "write clean: full"),
        ({**FULL, "bias": True}, "leave bias out"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrH(**options)


@pytest.mark.parametrize(
    ("options", "model", "said"),
    [
        (FULL, "digits_cnn", r"'conv1' \(Conv2d\) is neither; use layers: top"),
        (FULL, "mnist_cnn", r"'conv1' \(Conv2d\) is neither; use estimate: hutchinson"),
        ({**FULL, "estimate": "hutchinson"}, "digits_cnn", r"'bn1' \(BatchNorm2d\); use layers: top"),
    ],
)
def test_networks_are_checked_before_training_as_they_will_be_in_it(
    options: dict[str, Any], model: str, said: str
) -> None:
    net = create_model(model, seed=0).eval()
    with pytest.raises(ModelError, match=said):
        TrH(**options).check(net)
    assert not any(m.training for m in net.modules())


def test_networks_that_fit_pass_the_check() -> None:
    TrH().check(create_model("digits_cnn", seed=0))
    TrH(**FULL).check(create_model("moons_mlp", seed=0))
    TrH(estimate="hutchinson", **FULL).check(create_model("mnist_cnn", seed=0))


def test_an_estimate_through_batch_statistics_is_refused_in_the_loss_too() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    method = TrH(estimate="hutchinson", **FULL)
    with pytest.raises(ModelError, match="BatchNorm1d"):
        method.in_loss(look("at", model=net.train()))
    assert method.in_loss(look("at", model=net.eval())) is not None


def test_a_loss_term_without_a_closed_trace_is_named() -> None:
    seen = look("at")
    odd = Look(
        seen.model, seen.x, seen.x_adv, seen.y, seen.views, Parts({"hinge": seen.x.sum()}, {"hinge": 1.0}), seen.moment
    )
    with pytest.raises(ConfigError, match=r"'hinge'.*layers: full"):
        TrH().in_loss(odd)
