"""GAT inside the training step: its turns and its weight by the number of the step, beside every flatness method, and
after a stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.rng import random_states
from flatrock.core.types import Point
from flatrock.data.loader import Batch
from flatrock.engine.craft import craft
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.loss import Stage, objective_gradients
from flatrock.engine.step import train_step

MakeJob = Callable[..., Job]
EPS = 0.1
AWP, SWA = {"name": "awp", "gamma": 0.01}, {"name": "swa", "decay": 0.8, "bn": "recompute", "batches": 2}
METHODS: list[list[dict[str, Any]]] = [
    [{"name": "awp", "gamma": 0.01}],
    [{"name": "rat", "eta": 0.2, "sigma": 1e-3}],
    [{"name": "trh", "weight": 1e-2, "clean": "full"}],
    [{"name": "s2o", "weight": 0.3}],
    [{"name": "sam", "rho": 0.05}],
    [{"name": "awp", "gamma": 0.01}, {"name": "rat"}, {"name": "trh", "weight": 1e-2}, {"name": "swa"}],
]


@pytest.fixture
def gat(make_job: MakeJob, tmp_path: Path) -> Callable[..., Job]:
    """A job of GAT in a folder of this name: 4 epochs of 3 steps, the weight rises in step 10 of 0 to 11."""

    def make(name: str = "run", **overrides: Any) -> Job:
        keys = {"objective": {"name": "gat", **overrides.pop("options", {})}, "attack": {"name": "guided"}}
        return make_job(tmp_path / name, **keys, **overrides)

    return make


def batches(job: Job) -> list[Batch]:
    return [batch for epoch in range(4) for batch in job.loader.epoch(epoch)]


def stage_of(job: Job, batch: Batch, step: int) -> Stage:
    return Stage(job, batch.x, batch.y, batch.ids, job.moment(step))


def reference(job: Job, batch: Batch, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """x' and the terms of the loss of one step, written down once more; the model is left in eval mode's statistics."""
    model, x, y = job.model, batch.x, batch.y
    weight = 40.0 if step >= 10 else 10.0
    model.eval()
    u = job.seed.child("attack", step).samples(batch.ids).child("start").uniform(x)
    x0 = (x + EPS / 2 * torch.where(u < 0.5, 1.0, -1.0)).clamp(0, 1).requires_grad_(True)
    climbed = nn.functional.cross_entropy(model(x0), y, reduction="sum")
    if step % 2 == 1:
        climbed = climbed + weight * (model(x).softmax(1).detach() - model(x0).softmax(1)).square().sum()
    (slope,) = torch.autograd.grad(climbed, x0)
    x_adv = (x + (x0.detach() + EPS * slope.sign() - x).clamp(-EPS, EPS)).clamp(0, 1)
    model.train()
    clean, adv = model(x), model(x_adv)
    distance = (clean.softmax(1) - adv.softmax(1)).square().sum(1).mean()
    ce = nn.functional.cross_entropy(clean, y)
    return x_adv, {"ce": ce, "pair_probabilities": distance, "total": ce + weight * distance}


def test_every_step_is_that_of_a_loop(gat: Callable[..., Job]) -> None:
    """All 12 steps: turns, the weight that rises, the loss, and the update SGD makes of it."""
    job, other = gat("a"), gat("b")
    job.model.train()
    other.model.train()
    for step, batch in enumerate(batches(job)):
        made = craft(stage_of(job, batch, step), {})[0].x_adv
        x_adv, terms = reference(other, batch, step)
        torch.testing.assert_close(made, x_adv, rtol=0, atol=1e-6)
        other.optimizer.zero_grad(set_to_none=True)
        terms["total"].backward()  # type: ignore[no-untyped-call]
        other.optimizer.step()
        outcome = train_step(job, batch, step=step, guard=True)
        got = {name: float(value) for name, value in outcome.losses.items()}
        assert got == pytest.approx({name: float(value.detach()) for name, value in terms.items()}, rel=1e-4, abs=1e-6)
        for p, q in zip(job.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)
            with torch.no_grad():
                q.copy_(p)  # differences of rounding must not grow from step to step


def test_passes_of_a_step(gat: Callable[..., Job]) -> None:
    """One attack pass in even steps, two in odd ones, always one of them with gradient; two passes of the loss."""
    job, counts = gat(), [0, 0]

    def seen(_: nn.Module, inputs: Any, output: Tensor) -> None:
        counts[0] += 1
        if output.requires_grad:
            output.register_hook(lambda grad: counts.__setitem__(1, counts[1] + 1))

    job.model.get_submodule("head").register_forward_hook(seen)
    job.model.train()
    found = []
    for step, batch in enumerate(batches(job)[:4]):
        counts[:] = [0, 0]
        train_step(job, batch, step=step, guard=False)
        found.append(tuple(counts))
    assert found == [(3, 3), (4, 3), (3, 3), (4, 3)]


@pytest.mark.parametrize("step", [9, 10])
def test_the_weight_of_the_step_is_that_of_the_ascent(gat: Callable[..., Job], step: int) -> None:
    """What AWP and SAM climb is the loss of their step."""
    job = gat()
    job.model.train()
    batch = batches(job)[step]
    point = Point((batch.x + 0.05).clamp(0, 1))
    got = objective_gradients(stage_of(job, batch, step), {}, (point,))
    fixed = replace(job, objective=replace(job.objective, weight=40.0 if step == 10 else 10.0, rise=1.0))  # type: ignore[type-var]
    want = objective_gradients(stage_of(fixed, batch, 0), {}, (point,))
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("flatness", METHODS, ids=lambda methods: "+".join(m["name"] for m in methods))
def test_flatness_methods_act_beside_it(gat: Callable[..., Job], flatness: list[dict[str, Any]]) -> None:
    base, job = gat("base"), gat("flat", flatness=flatness)
    for one in (base, job):
        one.model.train()
        for step, batch in enumerate(batches(one)[:3]):
            outcome = train_step(one, batch, step=step, guard=True)
            assert all(bool(torch.isfinite(value)) for value in outcome.losses.values())
            assert outcome.losses.keys() >= {"ce", "pair_probabilities", "total"}
    same = [torch.equal(a, b) for a, b in zip(base.model.parameters(), job.model.parameters(), strict=True)]
    assert not all(same)


def test_trades_takes_the_attack(gat: Callable[..., Job], make_job: MakeJob, tmp_path: Path) -> None:
    """TRADES + GAT: the loss of one, the step of the other."""
    job = make_job(tmp_path / "run", objective={"name": "trades"}, attack={"name": "guided"})
    made = [craft(stage_of(j, batches(j)[1], 1), {})[0].x_adv for j in (job, gat())]
    assert torch.equal(*made)
    job.model.train()
    assert train_step(job, batches(job)[1], step=1, guard=True).losses.keys() == {"total", "ce", "kl"}


def test_a_stopped_run_ends_like_one_that_was_not(
    gat: Callable[..., Job], snapshot: Callable[[Path], dict[str, Any]], stopper: Callable[[int], Any]
) -> None:
    """Stopped after odd and even numbers of steps, and where the weight rises."""
    keys: dict[str, Any] = {"flatness": [AWP, SWA], "train__save_seconds": 1e-9}
    whole = train(gat("whole", **keys))
    for step in (2, 5, 11):
        with pytest.raises(KeyboardInterrupt):
            train(gat("stopped", **keys), resume=step > 2, progress=stopper(step))
    run = train(gat("stopped", **keys), resume=True)
    assert run.status == "finished"
    assert run.records[-1].terms.keys() >= {"ce", "pair_probabilities"}
    assert snapshot(run.folder) == snapshot(whole.folder)


@pytest.mark.parametrize("passes", [1, 2])
def test_what_was_borrowed_comes_back_when_the_attack_fails(gat: Callable[..., Job], passes: int) -> None:
    job, calls = gat(), [0]
    job.model.train()
    batch = batches(job)[1]

    def boom(_: nn.Module, inputs: Any, output: Tensor) -> None:
        calls[0] += 1
        if calls[0] == passes:
            raise RuntimeError("boom")

    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    drawn = random_states()
    handle = job.model.get_submodule("head").register_forward_hook(boom)
    with pytest.raises(RuntimeError, match="boom"):
        train_step(job, batch, step=1, guard=False)
    handle.remove()
    assert calls == [passes]
    assert all(torch.equal(before[name], tensor) for name, tensor in job.model.state_dict().items())
    assert all(m.training for m in job.model.modules())
    assert all(p.requires_grad and p.grad is None for p in job.model.parameters())
    assert random_states() == drawn


def test_it_learns_to_resist(gat: Callable[..., Job]) -> None:
    """From images to records on a CPU: what it trains withstands the probe's attack better than chance by far."""
    run = train(gat(data__limit=600, train__epochs=8, train__batch_size=32, optimizer__lr=0.2))
    assert run.status == "finished"
    assert run.records[-1].clean is not None and run.records[-1].clean > 0.8
    trained = [r.train_robust for r in run.records if r.train_robust is not None]
    assert trained[-1] > 0.5
