"""Every recipe of the library takes two real training steps with its real network."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.step import train_step
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe, recipe_names

# Two steps of two samples with one attack step each: the whole machinery, little arithmetic.
TINY = {
    "data.held_out": 2,
    "data.limit": 4,
    "train.batch_size": 2,
    "train.max_steps": 2,
    "train.tensorboard": False,
    "attack.steps": 1,
    "select.attack": "pgd-1",
}
SMALL_DATA = [n for n in recipe_names() if n.startswith(("digits", "moons"))]
FILE_DATA = [n for n in recipe_names() if n not in SMALL_DATA]
# Large networks, and rows that differ from one in the default run by the norm alone.
SLOW = [n for n in FILE_DATA if n.endswith("wrn34") or n.startswith("cifar10_at_l2_")]


def weights(job: Job) -> list[torch.Tensor]:
    return [p.detach().clone() for p in job.model.parameters()]


def check_two_steps(job: Job) -> None:
    before = weights(job)
    for step, batch in enumerate(job.loader.epoch(0)):
        outcome = train_step(job, batch, step=step, guard=True)
        assert outcome.samples == 2
        assert math.isfinite(outcome.losses["total"].item())
    assert step == 1
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(job), strict=True)]
    assert all(moved), f"{moved.count(False)} of {len(moved)} parameters did not move"
    assert 0 <= job.probe(job.model).robust <= 1


@pytest.mark.parametrize("name", SMALL_DATA)
def test_small_recipes_train_and_stop_after_two_steps(name: str, run_folder: Path) -> None:
    recipe = load_recipe(name, {**TINY, "train.epochs": 3, "data.held_out": 20, "train.tensorboard": True})
    run = train(build_job(recipe, folder=run_folder))
    assert run.status == "truncated"
    assert [r.step for r in run.records] == [2]
    assert (run_folder / "last.safetensors").is_file()


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in FILE_DATA])
def test_two_steps(name: str, made_up_data: list[tuple[str, str]], run_folder: Path) -> None:
    recipe = load_recipe(name, TINY)
    check_two_steps(build_job(recipe, folder=run_folder))
    assert made_up_data == [(recipe.data.name, "train")]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILE_DATA)
def test_whole_runs_end_with_their_files(name: str, made_up_data: list[tuple[str, str]], run_folder: Path) -> None:
    run = train(build_job(load_recipe(name, TINY), folder=run_folder))
    assert run.status == "truncated"
    assert (run_folder / "last.safetensors").is_file()
