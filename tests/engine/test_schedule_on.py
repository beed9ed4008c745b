"""`optimizer.schedule_on: decayed`: what is not decayed keeps the first rate, as with --l2 of Rice's and AWP's code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flatrock.core.errors import ConfigError
from flatrock.engine.follow import set_lr
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.step import train_step
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash

MakeJob = Callable[..., Job]
TWO = {"decay_on": "weights", "weight_decay": 5e-3, "lr": 0.2}
DROPS: dict[str, Any] = {"name": "piecewise", "milestones": [1, 2], "clock": "epoch"}


def job_of(make_job: MakeJob, folder: Path, **more: Any) -> Job:
    return make_job(folder, optimizer={**TWO, **more}, schedule=DROPS)


def test_only_decayed_parameters_follow_the_schedule(make_job: MakeJob, tmp_path: Path) -> None:
    job = job_of(make_job, tmp_path, schedule_on="decayed")
    rates = []
    for step in (0, 3, 6):
        set_lr(job, step)
        rates.append([group["lr"] for group in job.optimizer.param_groups])
    assert rates == [[pytest.approx(rate), 0.2] for rate in (0.2, 0.02, 0.002)]
    names = {id(p): n for n, p in job.model.named_parameters()}
    kept = {names[id(p)] for p in job.optimizer.param_groups[1]["params"]}
    assert kept == {n for n, p in job.model.named_parameters() if p.dim() == 1}


def test_the_weights_are_those_of_an_optimizer_whose_second_group_is_forgotten(
    make_job: MakeJob, tmp_path: Path
) -> None:
    ours, theirs = job_of(make_job, tmp_path, schedule_on="decayed"), job_of(make_job, tmp_path)
    for job in (ours, theirs):
        job.model.train()
    batches = [batch for epoch in range(3) for batch in ours.loader.epoch(epoch)]
    for step, batch in enumerate(batches):
        set_lr(ours, step)
        theirs.optimizer.param_groups[0]["lr"] = theirs.schedule.at(step, len(theirs.loader))
        for job in (ours, theirs):
            train_step(job, batch, step=step, guard=True)
    pairs = zip(ours.model.state_dict().values(), theirs.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    plain = job_of(make_job, tmp_path)
    plain.model.train()
    for step, batch in enumerate(batches):
        set_lr(plain, step)
        train_step(plain, batch, step=step, guard=True)
    gap = (plain.model.get_parameter("bn1.bias") - ours.model.get_parameter("bn1.bias")).abs().max()
    assert float(gap.detach()) > 1e-3, "in the end their rates are 100 times apart"


def test_a_resumed_run_keeps_the_rate(
    make_job: MakeJob, tmp_path: Path, stopper: Callable[[int], Any], snapshot: Callable[..., dict[str, Any]]
) -> None:
    train(job_of(make_job, tmp_path / "whole", schedule_on="decayed"))
    with pytest.raises(KeyboardInterrupt):
        train(job_of(make_job, tmp_path / "cut", schedule_on="decayed"), progress=stopper(7))
    train(job_of(make_job, tmp_path / "cut", schedule_on="decayed"), resume=True)
    assert snapshot(tmp_path / "whole") == snapshot(tmp_path / "cut")


def test_it_needs_two_groups_and_is_in_the_hash_where_it_is_chosen() -> None:
    with pytest.raises(ConfigError, match=r"schedule_on 'decayed' needs two groups.*decay_on is 'all'; set"):
        load_recipe("digits_at", {"optimizer.schedule_on": "decayed"})
    two = {"optimizer.decay_on": "weights"}
    hashes = [recipe_hash(load_recipe("digits_at", {**two, "optimizer.schedule_on": on})) for on in ("all", "decayed")]
    assert hashes[0] == recipe_hash(load_recipe("digits_at", two)) != hashes[1]
