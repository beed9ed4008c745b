"""AdamW in training: a plain loop of torch's own, stops, and weights that are moved while it steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flatrock.data.loader import Batch
from flatrock.engine.craft import craft
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.loss import Stage, objective_gradients
from flatrock.engine.step import train_step

MakeJob = Callable[..., Job]
ADAMW = {"name": "adamw", "lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.3}
STANDARD: dict[str, Any] = {"objective": {"name": "standard"}, "attack": {}}


@pytest.mark.parametrize("decay_on", ["all", "weights"])
@pytest.mark.parametrize("keys", [STANDARD, {}], ids=["standard", "at"])
def test_it_is_a_plain_loop_of_torch_adamw(
    make_job: MakeJob, tmp_path: Path, keys: dict[str, Any], decay_on: str
) -> None:
    """Bit by bit, two epochs, the schedule's rates included."""
    keys = {**keys, "optimizer": {**ADAMW, "decay_on": decay_on}, "train__epochs": 2}
    job, other = make_job(tmp_path / "run", **keys), make_job(tmp_path / "other", **keys)
    train(job)
    model = other.model.train()
    matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) == m] for m in (True, False))
    groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0 if decay_on == "weights" else 0.3}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    for step in range(6):
        batch = list(other.loader.epoch(step // 3))[step % 3]
        (point,) = craft(Stage(other, batch.x, batch.y, batch.ids, other.moment(step)), {})
        for group in optimizer.param_groups:
            group["lr"] = other.schedule.at(step, 3)
        optimizer.zero_grad()
        F.cross_entropy(model(point.x_adv), batch.y).backward()
        optimizer.step()
    state, expected = job.model.state_dict(), model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


STACKS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "awp inside": [{"name": "awp", "gamma": 0.02, "step": "inside"}],
    "awp after": [{"name": "awp", "gamma": 0.02, "step": "after"}],
    "averages and penalties": [{"name": "swa", "decay": 0.5}, {"name": "trh", "weight": 1e-2, "gamma": 1e-4}],
}


@pytest.mark.parametrize("stack", STACKS)
def test_stops_change_no_bit(
    make_job: MakeJob, tmp_path: Path, stopper: Callable[[int], Any], snapshot: Callable[..., Any], stack: str
) -> None:
    """A stop after every step: moments and the number of updates come back."""
    keys = {"optimizer": {**ADAMW, "decay_on": "weights"}, "flatness": STACKS[stack], "train__epochs": 2}

    def job(name: str) -> Job:
        return make_job(tmp_path / name, train__save_seconds=1e-9, **keys)

    train(job("whole"))
    for step in range(2, 7):
        with pytest.raises(KeyboardInterrupt):
            train(job("stopped"), resume=step > 2, progress=stopper(step))
    train(job("stopped"), resume=True)
    assert snapshot(tmp_path / "stopped") == snapshot(tmp_path / "whole")


@pytest.mark.parametrize("where", ["inside", "after"])
def test_awp_and_decay(make_job: MakeJob, tmp_path: Path, where: str) -> None:
    """The first update, g / (|g| + eps), of the gradient at w + v; `inside` the decay is that of w + v, too."""
    keys = {"flatness": [{"name": "awp", "gamma": 0.2, "step": where}], "schedule": {"name": "constant"}}
    job = make_job(tmp_path / "run", optimizer=ADAMW, **keys)
    job.model.double().train()
    batch = next(iter(job.loader.epoch(0)))
    batch = Batch(batch.x.double(), batch.y, batch.ids)
    w = {n: p.detach().clone() for n, p in job.model.named_parameters()}
    stage = Stage(job, batch.x, batch.y, batch.ids, job.moment(0))
    points = craft(stage, {})
    g = objective_gradients(stage, {}, points)
    v = {n: 0.2 * w[n].norm() * g[n] / g[n].norm() for n in g if w[n].dim() > 1}
    g = objective_gradients(stage, v, points)
    train_step(job, batch, step=0, guard=True)
    for name, p in job.model.named_parameters():
        at = w[name] + (v.get(name, 0.0) if where == "inside" else 0.0)
        expected = w[name] - 0.01 * (0.3 * at + g[name] / (g[name].abs() + 1e-6))
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-9)
