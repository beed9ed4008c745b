"""PGD as papers count it: every step is made, and only the last point is judged (`iterate: last`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.attacks.catalog import describe, parse_attack
from flatrock.attacks.gradient import GradientAttack
from flatrock.core.rng import SampleGen, Seed, kept_global_rng
from flatrock.core.threat import L2, Linf, Threat
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.fast_model import Counted
from flatrock.evaluation.plans import make_plan

THREATS: list[Threat] = [Linf(0.04), L2(0.15)]
STEP = {"linf": 0.02, "l2": 0.06}
N = 120


class Wavy(nn.Module):
    """A network with ripples in its logits: steps too long for them break samples, and then heal them again."""

    def __init__(self) -> None:
        super().__init__()
        with kept_global_rng(seed=Seed(7).child("wavy")):
            self.body = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4)).double()
        self.rows: list[int] = []
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        z: Tensor = 4 * self.body(x)
        return z + 0.3 * torch.sin(40 * z)


def data() -> tuple[Tensor, Tensor]:
    """Inputs and labels, most of them the network's own answers."""
    x = torch.rand(N, 12, generator=Seed(1).generator(), dtype=torch.float64)
    y = Wavy()(x).detach().argmax(1)
    y[::10] = (y[::10] + 1) % 4
    return x, y


def cw(logits: Tensor, y: Tensor) -> Tensor:
    other = logits.masked_fill(F.one_hot(y, 4).bool(), -torch.inf).amax(1)
    return -(logits.gather(1, y[:, None]).squeeze(1) - other + 50).clamp_min(0)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pgd": lambda logits, y: F.cross_entropy(logits, y, reduction="none"),
    "cw": cw,
}


def by_hand(name: str, x: Tensor, y: Tensor, threat: Threat, start: Tensor, steps: int, size: float) -> Tensor:
    """The loop of the papers' evaluation code: the last iterate."""
    model, x_adv = Wavy(), start.clone()
    for _ in range(steps):
        x_adv.requires_grad_(True)
        (grad,) = torch.autograd.grad(LOSSES[name](model(x_adv), y).sum(), x_adv)
        if threat.norm == "linf":
            delta = (x_adv.detach() + size * grad.sign() - x).clamp(-threat.eps, threat.eps)
        else:
            delta = x_adv.detach() + size * grad / grad.norm(dim=1, keepdim=True) - x
            delta = delta * (threat.eps / delta.norm(dim=1, keepdim=True)).clamp(max=1)
        x_adv = (x + delta).clamp(0, 1)
    return x_adv


def started(label: str, x: Tensor, threat: Threat) -> Tensor:
    gen = Seed(0).child("evaluate").child(label).samples(torch.arange(N)).child("restart", 0)
    return (x + threat.sample(x, gen)).clamp(0, 1)


# The verdict is that of a plain loop


@pytest.mark.parametrize("start", ["zero", "uniform"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("threat", THREATS, ids=["linf", "l2"])
def test_the_verdict_of_every_sample_is_that_of_a_plain_loop(threat: Threat, name: str, start: str) -> None:
    x, y = data()
    size = STEP[threat.norm]
    label = f"{name}-20:start={start}:step_size={size}:iterate=last"
    result = evaluate(Wavy(), x, y, threat, attacks=[label], batch_size=50)
    x_adv = by_hand(name, x, y, threat, x if start == "zero" else started(label, x, threat), 20, size)
    right = Wavy()(x_adv).argmax(1) == y
    clean = result.flags["clean"]
    assert torch.equal(result.flags[label], right & clean)
    assert 0 < float(right.double().mean()) < 1


@pytest.mark.parametrize("threat", THREATS, ids=["linf", "l2"])
def test_samples_that_heal_on_the_way_make_the_difference(threat: Threat) -> None:
    """`any`, the default, counts them as broken; the two agree on the samples that are broken at the end."""
    x, y = data()
    plan = [f"pgd-20:start=zero:step_size={STEP[threat.norm]}{more}" for more in ("", ":iterate=last")]
    result = evaluate(Wavy(), x, y, threat, attacks=plan)
    met, last = (result.flags[name] for name in plan)
    assert bool((met <= last).all())
    assert int((last & ~met).sum()) >= 5, "the network was made for it"
    assert result.robust == result.per_attack[plan[0]], "the worst case counts every point that broke a sample"


# Steps, costs, others


@pytest.mark.parametrize("restarts", [1, 3])
def test_nobody_leaves_early_and_the_costs_say_so(restarts: int) -> None:
    x, y = data()
    model, label = Wavy(), f"pgd-5:iterate=last:restarts={restarts}"
    result = evaluate(model, x, y, Linf(0.3), attacks=[label])
    right = int(result.flags["clean"].sum())
    each = 5 * restarts + (restarts if restarts > 1 else 0)
    assert model.rows[4 : 4 + each + 1] == [right] * (each + 1), "every step, with all that were right, and the verdict"
    assert result.costs[label]["forwards"] == right * (each + 1)
    assert result.costs[label]["backwards"] == right * 5 * restarts
    assert parse_attack(label)[1].passes(4) == each
    assert result.per_attack[label] < 0.6, "many could have left"


def test_other_attacks_are_what_they_were() -> None:
    x, y = data()
    plan = ["pgd-10", "cw-10", "apgd-ce"]
    alone = evaluate(Wavy(), x, y, THREATS[0], attacks=plan)
    beside = evaluate(Wavy(), x, y, THREATS[0], attacks=[*plan, "pgd-10:iterate=last"])
    assert all(torch.equal(alone.flags[name], beside.flags[name]) for name in plan)
    assert alone.costs["pgd-10"]["forwards"] == beside.costs["pgd-10"]["forwards"]


def test_in_training_the_last_point_is_all_there_is() -> None:
    x, y = data()
    gen = Seed(3).samples(torch.arange(N))
    points = [GradientAttack(steps=6, iterate=way)(Wavy(), x, y, THREATS[0], gen) for way in ("any", "last")]
    assert torch.equal(*points)


@pytest.mark.parametrize("early_stop", [False, True])
def test_of_restarts_the_largest_final_loss_counts(early_stop: bool) -> None:
    """By hand, as Rice's and AWP's code has it: broken or not, of equals the later."""
    x, y, threat = *data(), THREATS[1]
    gen = Seed(3).samples(torch.arange(N))
    options: dict[str, Any] = {"steps": 4, "step_size": STEP["l2"]}
    got = GradientAttack(**options, restarts=3, iterate="last")(Wavy(), x, y, threat, gen, early_stop=early_stop)
    kept, loss = x, torch.full((N,), -torch.inf, dtype=torch.float64)
    for r in range(3):
        start = (x + threat.sample(x, gen.child("restart", r))).clamp(0, 1)
        tried = by_hand("pgd", x, y, threat, start, 4, STEP["l2"])
        new = LOSSES["pgd"](Wavy()(tried), y).detach()
        better = new >= loss
        kept, loss = torch.where(better[:, None], tried, kept), torch.where(better, new, loss)
    torch.testing.assert_close(got, kept, rtol=0, atol=1e-12)
    any_way = GradientAttack(**options, restarts=3)(Wavy(), x, y, threat, gen)
    broken = [int((Wavy()(v).argmax(1) != y).sum()) for v in (any_way, got)]
    assert broken[0] > broken[1], "the default keeps what is broken first"


class Flat(nn.Module):
    """Always the same answer."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_tensor([[1.0, 0.0]]) + 0 * x.flatten(1).sum(1, keepdim=True)


def test_of_equals_the_later_counts() -> None:
    x, y = torch.full((3, 4), 0.5, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    gen: SampleGen = Seed(0).samples(torch.arange(3))
    got = GradientAttack(steps=0, restarts=3, iterate="last")(Flat(), x, y, Linf(0.1), gen)
    assert torch.equal(got, x + Linf(0.1).sample(x, gen.child("restart", 2)))


class Anxious(nn.Module):
    """A twin that gives the runner-up where the network is sure by less than 2."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Wavy()

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.model(x)
        return z - 2 * torch.zeros_like(z).scatter(1, z.argmax(1, keepdim=True), 1)


@pytest.mark.parametrize(("spec", "disputed"), [("pgd-3", True), ("pgd-3:iterate=last", False)])
def test_nobody_is_attacked_again_whom_nobody_gave_up_on(spec: str, disputed: bool) -> None:
    """The twin may call its last point broken by mistake; the model judges it, and that is all."""
    x, y = data()
    model = Wavy().requires_grad_(False)
    exam = Exam(model, Counted(Anxious()), x, y, THREATS[0], torch.device("cpu"), N, Seed(0), exact=False)
    (step,) = make_plan([spec])
    chunk = exam.attempt(step, torch.arange(N))
    assert (chunk.numbers["disputed"] > 0) == disputed
    assert (chunk.numbers["forwards"] == 4 * N) == (not disputed)


# What is written down


def test_results_tell_it_where_it_was_chosen() -> None:
    plain, last = (describe(parse_attack(spec)[1], Linf(0.1)) for spec in ("pgd-20", "pgd-20:iterate=last"))
    assert "iterate" not in plain
    assert last == {**plain, "iterate": "last"}
