"""Label smoothing inside the training step: 0 to the bit, attacks and accuracies with hard labels, and resumption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatrock.engine.craft import craft
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.loss import Stage, objective_gradients
from flatrock.engine.step import train_step

MakeJob = Callable[..., Job]
NAMES = ("standard", "at", "trades", "gat", "alp")


def keys_of(name: str, **options: Any) -> dict[str, Any]:
    attack: dict[str, dict[str, Any]] = {"gat": {"name": "guided"}}
    keys: dict[str, Any] = {"objective": {"name": name, **options}}
    return keys | ({"attack": attack[name]} if name in attack else {})


def stepped(job: Job, count: int = 3) -> list[dict[str, float]]:
    job.model.train()
    steps = zip(range(count), job.loader.epoch(0), strict=False)
    return [
        {k: float(v) for k, v in train_step(job, batch, step=step, guard=True).losses.items()} for step, batch in steps
    ]


@pytest.mark.parametrize("name", NAMES)
def test_zero_is_bit_identical_and_has_the_same_hash(make_job: MakeJob, tmp_path: Path, name: str) -> None:
    plain, zero = (make_job(tmp_path / "run", **keys_of(name, **o)) for o in ({}, {"label_smoothing": 0}))
    assert stepped(plain) == stepped(zero)
    for p, q in zip(plain.model.parameters(), zero.model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert plain.recipe_hash == zero.recipe_hash


@pytest.mark.parametrize("name", ["at", "trades", "gat", "alp"])
def test_attacks_and_flatness_keep_hard_labels(make_job: MakeJob, tmp_path: Path, name: str) -> None:
    """The same x', whatever the loss makes of labels; and the batch's own labels are left as they were."""
    plain, smooth = (make_job(tmp_path / "run", **keys_of(name, **o)) for o in ({}, {"label_smoothing": 0.3}))
    made = []
    for job in (plain, smooth):
        batch = next(iter(job.loader.epoch(0)))
        y = batch.y.clone()
        made.append(craft(Stage(job, batch.x, batch.y, batch.ids, job.moment(1)), {})[0].x_adv)
        job.model.train()
        train_step(job, batch, step=1, guard=True)
        assert torch.equal(batch.y, y)
        assert not batch.y.is_floating_point()
    assert torch.equal(*made)
    assert stepped(plain) != stepped(smooth)


def test_awp_climbs_the_smoothed_loss(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", objective={"name": "standard", "label_smoothing": 0.2}, attack={})
    job.model.train()
    batch = next(iter(job.loader.epoch(0)))
    stage = Stage(job, batch.x, batch.y, batch.ids, job.moment(0))
    got = objective_gradients(stage, {}, craft(stage, {}))
    log_p = job.model(batch.x).log_softmax(1)
    rows = 0.8 * nn.functional.one_hot(batch.y, 10) + 0.02
    parameters = dict(job.model.named_parameters())
    want = torch.autograd.grad(-(rows * log_p).sum(1).mean(), list(parameters.values()))
    for name, grad in zip(parameters, want, strict=True):
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6)


def test_a_stopped_run_ends_like_one_that_was_not(
    make_job: MakeJob, tmp_path: Path, snapshot: Callable[[Path], dict[str, Any]], stopper: Callable[[int], Any]
) -> None:
    keys = keys_of("trades", label_smoothing=0.1) | {"flatness": [{"name": "rat"}], "train__save_seconds": 1e-9}
    train(make_job(tmp_path / "whole", **keys))
    for step in (4, 8):
        with pytest.raises(KeyboardInterrupt):
            train(make_job(tmp_path / "stopped", **keys), resume=step > 4, progress=stopper(step))
    run = train(make_job(tmp_path / "stopped", **keys), resume=True)
    assert run.status == "finished"
    assert snapshot(tmp_path / "stopped") == snapshot(tmp_path / "whole")
