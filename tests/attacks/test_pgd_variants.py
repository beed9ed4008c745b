"""What released code does otherwise in PGD, by name: the order of box and ball, a start outside of the ball."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import ATTACKS, attack, describe, parse_attack
from flatrock.attacks.craft import check_crafted
from flatrock.attacks.gradient import GradientAttack
from flatrock.attacks.pgd import move
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf, Threat

Make = Callable[..., Any]
THREATS: list[Threat] = [Linf(0.1), L2(0.6)]


def network(seed: int = 2) -> nn.Module:
    with kept_global_rng(seed=Seed(seed)):
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4)).double()


def batch(n: int = 40) -> tuple[Tensor, Tensor]:
    """Inputs of which many numbers lie near a face of the box."""
    gen = Seed(1).child("variants").generator()
    x = torch.rand(n, 6, dtype=torch.float64, generator=gen)
    return torch.where(x < 0.3, x / 10, x), torch.randint(4, (n,), generator=gen)


# Box and ball


def test_golden_orders() -> None:
    """x = (0.9, 0.5), a step of (0.4, 0.3), radius 0.4: (0.8, 0.6) is the direction, 0.1 the room on the first axis."""
    x, step = torch.tensor([[0.9, 0.5]], dtype=torch.float64), torch.tensor([[0.4, 0.3]], dtype=torch.float64)
    threat = L2(0.4)
    last = move(x, x, step, threat) - x
    assert last[0].tolist() == pytest.approx([0.1, 0.24], abs=1e-15), "0.4 (0.8, 0.6), then cut to the room"
    first = move(x, x, step, threat, box="first") - x
    assert first[0].tolist() == pytest.approx([0.1, 0.3], abs=1e-15), "cut to the room: 0.316 long, inside"
    short = move(x, x, step, L2(0.2), box="first") - x
    assert short[0].tolist() == pytest.approx([0.2 * 0.1 / 0.1**0.5, 0.2 * 0.3 / 0.1**0.5], abs=1e-15)


@pytest.mark.parametrize("threat", THREATS, ids=["linf", "l2"])
def test_the_loop_of_trades_in_l2(threat: Threat) -> None:
    """Clip x' to the box, then shrink x' - x to the radius: a loop written out."""
    model, (x, y), gen = network(), batch(), Seed(3).samples(torch.arange(40))
    got = GradientAttack(steps=7, step_size=0.2, start="zero", box="first")(model, x, y, threat, gen)
    delta = torch.zeros_like(x)
    for _ in range(7):
        point = (x + delta).requires_grad_(True)
        (grad,) = torch.autograd.grad(nn.functional.cross_entropy(model(point), y, reduction="sum"), point)
        delta = delta + 0.2 * (grad.sign() if threat.norm == "linf" else grad / grad.norm(dim=1, keepdim=True))
        delta = (x + delta).clamp(0, 1) - x
        if threat.norm == "linf":
            delta = delta.clamp(-threat.eps, threat.eps)
        else:
            delta = delta * (threat.eps / delta.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(got, x + delta, rtol=0, atol=1e-12)
    assert float(threat.size(got - x).max()) <= threat.eps * (1 + 1e-6)
    assert float(got.min()) >= 0 and float(got.max()) <= 1
    other = GradientAttack(steps=7, step_size=0.2, start="zero")(model, x, y, threat, gen)
    assert torch.allclose(got, other, rtol=0, atol=1e-12) == (threat.norm == "linf"), "in linf the order is all one"


def test_clipping_first_never_ends_nearer_to_x() -> None:
    gen = Seed(5).child("orders").generator()
    x = torch.rand(500, 8, generator=gen, dtype=torch.float64)
    step = torch.randn(500, 8, generator=gen, dtype=torch.float64)
    last, first = (L2(0.7).size(move(x, x, step, L2(0.7), box=box) - x) for box in ("last", "first"))
    assert bool((first >= last - 1e-12).all())
    assert float((first - last).max()) > 0.1


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize(
    "options", [{"box": "first"}, {"start": "wide"}, {"box": "first", "start": "wide", "steps": 1}]
)
@pytest.mark.parametrize("threat", THREATS, ids=["linf", "l2"])
def test_ball_and_box_hold(threat: Threat, options: dict[str, Any], early_stop: bool) -> None:
    model, (x, y), gen = network().float(), batch(), Seed(3).samples(torch.arange(40))
    x = x.float()
    made = GradientAttack(**{"steps": 5, **options})
    x_adv = made(model, x, y, threat, gen, early_stop=early_stop)
    check_crafted(x_adv, x, threat, made)
    assert not torch.equal(x_adv, x)


# The start of AWP's code for SVHN in L2


def test_the_wide_start_is_uniform_in_a_cube_and_the_first_step_projects_it() -> None:
    model, (x, y), gen, threat = network(), batch(), Seed(3).samples(torch.arange(40)), L2(0.6)
    seen: list[Tensor] = []
    handle = model.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().clone()))
    GradientAttack(steps=2, start="wide")(model, x, y, threat, gen)
    handle.remove()
    drawn = gen.child("restart", 0).uniform(x) - 0.5
    assert torch.equal(seen[0], (x + drawn).clamp(0, 1))
    assert float(threat.size(seen[0] - x).max()) > threat.eps + 0.1, "not in the ball"
    assert float(threat.size(seen[1] - x).max()) <= threat.eps * (1 + 1e-9), "after one step it is"


def test_what_breaks_outside_of_the_ball_does_not_count() -> None:
    """A network that is wrong out there only: nobody leaves at the start, and nobody is broken."""

    class Far(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            size = (x - 0.5).square().sum(1).sqrt()
            return torch.stack([0.3 - size, size - 0.3], 1)

    x, y = torch.full((20, 6), 0.5, dtype=torch.float64), torch.zeros(20, dtype=torch.int64)
    x_adv = attack("pgd", Far(), x, y, L2(0.2), steps=3, step_size=0.1, start="wide")
    assert float(L2(0.2).size(x_adv - x).max()) <= 0.2 * (1 + 1e-9)
    gen = Seed(0).samples(torch.arange(20))
    stopped = GradientAttack(steps=3, step_size=0.1, start="wide")(Far(), x, y, L2(0.2), gen, early_stop=True)
    assert float(L2(0.2).size(stopped - x).max()) <= 0.2 * (1 + 1e-9)


@pytest.mark.parametrize("early_stop", [False, True])
def test_steps_are_counted_as_ever(early_stop: bool) -> None:
    model, (x, y), gen, calls = network(), batch(), Seed(3).samples(torch.arange(40)), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    made = GradientAttack(steps=4, start="wide", box="first")
    made(model, x, y, L2(0.01), gen, early_stop=early_stop)
    assert len(calls) == made.passes(4) == 4


# What is written down


def test_options_that_came_later_are_told_where_they_were_chosen() -> None:
    """A result from before is of the attack without them."""
    plain, other = (describe(parse_attack(spec)[1], Linf(0.1)) for spec in ("pgd-20", "pgd-20:box=first"))
    assert "box" not in plain
    assert other == {**plain, "box": "first"}
    assert ATTACKS.make("pgd", box="last") == ATTACKS.make("pgd")
