"""Clipped gradients: torch's rule written out, nothing where the bound is not reached, and what is not clipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from start_cases import same
from torch import Tensor

from flatrock.core.errors import TrainingError
from flatrock.data.loader import Batch
from flatrock.engine import loss as loss_module
from flatrock.engine.craft import craft
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.loss import Stage, descend, objective_gradients
from flatrock.engine.step import StepOutcome, train_step
from flatrock.engine.watch import Watch

MakeJob = Callable[..., Job]
HIGH, LOW = 1e6, 0.05  # never reached; always
PLAIN: dict[str, Any] = {"optimizer": {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}}


def weights(job: Job) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in job.model.state_dict().items()}


def staged(job: Job, step: int = 0) -> Stage:
    job.model.train()
    batch = list(job.loader.epoch(0))[step]
    return Stage(job, batch.x, batch.y, batch.ids, job.moment(step))


def norm_of(tensors: Any) -> float:
    return float(torch.cat([t.double().flatten() for t in tensors]).norm())


@pytest.mark.parametrize("bound", [LOW, 0.7, HIGH])
def test_it_is_the_formula(make_job: MakeJob, tmp_path: Path, bound: float) -> None:
    """w - lr * g * min(1, bound / (||g|| + 1e-6)) in double precision, g the gradient with all penalties."""
    keys = {**PLAIN, "schedule": {"name": "constant"}, "flatness": ["trh"]}
    keys["optimizer"] = {**keys["optimizer"], "l2": 0.1}
    job, bare = make_job(tmp_path / "a", **keys, train__clip_norm=bound), make_job(tmp_path / "b", **keys)
    for one in (job, bare):
        one.model.double().train()
    batch = next(iter(job.loader.epoch(0)))
    batch = Batch(batch.x.double(), batch.y, batch.ids)
    before = {n: p.detach().clone() for n, p in job.model.named_parameters()}
    outcome = train_step(job, batch, step=0, guard=True)
    assert "grad_norm" not in train_step(bare, batch, step=0, guard=True).losses
    g = {n: p.grad for n, p in bare.model.named_parameters() if p.grad is not None}
    norm = norm_of(g.values())
    assert float(outcome.losses["grad_norm"]) == pytest.approx(norm, rel=1e-12)
    assert (norm > bound) == (bound < HIGH), "the case is what it says"
    for name, p in job.model.named_parameters():
        expected = before[name] - 0.1 * g[name] * min(1.0, bound / (norm + 1e-6))
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("optimizer", [{"lr": 0.4}, {"name": "adamw", "lr": 0.01}], ids=["sgd", "adamw"])
def test_it_is_a_plain_loop_that_clips(make_job: MakeJob, tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """Bit by bit, and the record has the mean of the norms."""
    keys = {"optimizer": optimizer, "train__clip_norm": 0.5, "train__epochs": 1}
    job, other = make_job(tmp_path / "run", **keys), make_job(tmp_path / "other", **keys)
    run, norms = train(job), []
    for step in range(3):
        stage = staged(other, step)
        (point,) = craft(stage, {})
        for group in other.optimizer.param_groups:
            group["lr"] = other.schedule.at(step, 3)
        other.optimizer.zero_grad()
        F.cross_entropy(other.model(point.x_adv), stage.y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.5)))
        other.optimizer.step()
    assert same(weights(job), weights(other))
    assert run.records[0].terms["grad_norm"] == pytest.approx(sum(norms) / 3, rel=1e-12)
    assert max(norms) > 0.5


STACKS: dict[str, dict[str, Any]] = {
    "at": {},
    "trades": {"objective": {"name": "trades"}, "flatness": ["awp", "rat", "swa"]},
    "entropy_sgd": {"optimizer": {"name": "entropy_sgd", "lr": 0.5, "steps": 3}},
    "atent": {"attack": {"name": "langevin", "steps": 3}, "flatness": ["sam"]},
}


@pytest.mark.parametrize("case", STACKS)
def test_a_bound_that_is_never_reached_changes_no_bit(make_job: MakeJob, tmp_path: Path, case: str) -> None:
    clipped = make_job(tmp_path / "a", **STACKS[case], train__clip_norm=HIGH)
    plain = make_job(tmp_path / "b", **STACKS[case])
    seen, bare = train(clipped), train(plain)
    assert same(weights(clipped), weights(plain))
    for one, two in zip(seen.records, bare.records, strict=True):
        assert {k: v for k, v in one.terms.items() if k != "grad_norm"} == two.terms
        assert 0 < one.terms["grad_norm"] < HIGH


def test_every_inner_gradient_of_entropy_sgd_is_clipped(make_job: MakeJob, tmp_path: Path) -> None:
    """The same bits as its own loop with a closure that clips."""
    keys = {"optimizer": {"name": "entropy_sgd", "lr": 0.5, "steps": 3}, "train__clip_norm": LOW}
    job, other = make_job(tmp_path / "a", **keys), make_job(tmp_path / "b", **keys)
    other = replace(other, clip_norm=None)
    stage = staged(other)
    outcome = train_step(job, next(iter(job.loader.epoch(0))), step=0, guard=True)
    points, norms = craft(stage, {}), []

    def update() -> None:
        descend(stage, points)
        norms.append(float(torch.nn.utils.clip_grad_norm_(other.model.parameters(), LOW)))

    update()
    other.optimizer.step(update)  # type: ignore[arg-type]
    assert len(norms) == 3
    assert min(norms) > LOW
    assert float(outcome.losses["grad_norm"]) == norms[0]
    assert same(weights(job), weights(other))


@pytest.mark.parametrize(("keys", "calls"), [({}, 1), ({"flatness": ["awp"]}, 1), (STACKS["entropy_sgd"], 3)])
def test_one_gradient_is_clipped_once(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], calls: int
) -> None:
    made: list[float] = []
    true = loss_module._clip

    def clip(model: Any, most: float) -> Tensor:
        made.append(most)
        return true(model, most)

    monkeypatch.setattr(loss_module, "_clip", clip)
    for bound, expected in ((LOW, [LOW] * calls), (None, [])):
        job = make_job(tmp_path / "run", **keys, train__clip_norm=bound)
        made.clear()
        train_step(job, next(iter(job.loader.epoch(0))), step=0, guard=True)
        assert made == expected


def test_the_ascent_is_not_clipped(make_job: MakeJob, tmp_path: Path) -> None:
    clipped, plain = (make_job(tmp_path / "run", train__clip_norm=bound) for bound in (LOW, None))
    found = []
    for job in (clipped, plain):
        stage = staged(job)
        found.append(objective_gradients(stage, {}, craft(stage, {})))
    assert same(*found)
    assert norm_of(found[0].values()) > LOW


def test_a_stop_changes_no_bit(
    make_job: MakeJob, tmp_path: Path, stopper: Callable[[int], Any], snapshot: Callable[..., Any]
) -> None:
    """The sum behind the record is restored, too."""

    def job(name: str) -> Job:
        return make_job(tmp_path / name, train__save_seconds=1e-9, train__clip_norm=0.5)

    train(job("whole"))
    with pytest.raises(KeyboardInterrupt):
        train(job("stopped"), progress=stopper(5))
    train(job("stopped"), resume=True)
    assert snapshot(tmp_path / "stopped") == snapshot(tmp_path / "whole")


@pytest.mark.parametrize(
    ("total", "norm", "message"),
    [
        (1.0, float("inf"), r"^the gradient became non-finite at step 7, not the loss; lower optimizer\.lr$"),
        (float("nan"), float("nan"), "^the loss became non-finite at step 7: term ce;"),
    ],
)
def test_a_gradient_that_is_not_finite_is_told(total: float, norm: float, message: str) -> None:
    losses = {name: torch.tensor(v) for name, v in (("total", total), ("ce", total), ("grad_norm", norm))}
    with pytest.raises(TrainingError, match=message):
        Watch().see(StepOutcome(losses, torch.tensor(1), torch.tensor(1), 1), 7)
