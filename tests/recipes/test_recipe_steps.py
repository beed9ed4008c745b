"""Every recipe of the library takes two real training steps; the default run narrows wide networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.step import train_step
from flatrock.recipes.build import build_job
from flatrock.recipes.load import TABLES, library, load_recipe, recipe_names
from flatrock.recipes.schema import Recipe

NamedRuns = Callable[..., dict[str, Any]]
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
NARROW = {"model.name": "wide_resnet", "model.depth": 10, "model.width": 1}
FEW_TOKENS = {"model.name": "vit", "model.depth": 1, "model.width": 12, "model.heads": 2, "model.patch": 8}
THIN_HYBRID = {"model.name": "hybrid", "model.depth": 1, "model.width": 12, "model.heads": 2}
# Of a published table, whose rows differ little, the default run takes these; of other recipes all but large networks.
OF_TABLES = (
    "cifar10_trades_rat1_linf_eta030",
    "cifar100_trades_awp_rat2_linf_wrn34",
    "cifar10_trades_awp_s2o_linf_wrn34",
    "svhn_trades_awp_rat2_l2",
    "cifar100_trades_awp_linf",
    "cifar10_trades_rat2_linf_mobilenetv2",
    "cifar10_at_rat2_linf",
    "cifar10_mart_s2o_linf_wrn34",
    "svhn_at_awp_linf",
    "cifar10_at_linf_l1",
    "cifar10_at_linf_l2",
    "cifar10_at_linf_cutout",
    "cifar10_at_linf_mixup",
    "cifar10_rst_awp_linf_wrn28",
    "cifar10_atent_l2_noise",
    "cifar10_atent_linf_wrn34",
    "cifar10_trades_l2_resnet20",
    "cifar10_at_s2o_vit_b",
    "cifar100_trades_swa_vit_b",
    "cifar10_trades_awp_vit_l",
    "cifar100_at_trh_hybrid_l",
    "imagenet_trades_trh_hybrid_l_l2",
)
SHARED = [n for n in FILE_DATA if library()[n].parent == TABLES]
QUICK = [n for n in FILE_DATA if n in OF_TABLES or (n not in SHARED and "wrn34" not in n)]
# Transformers of 300 million parameters do not become better tested by two steps of each.
WHOLE = [n for n in FILE_DATA if not n.removesuffix("_l2").endswith(("_vit_l", "_hybrid_l"))]


def tiny(name: str, folder: Path, named_runs: NamedRuns, **changes: Any) -> Recipe:
    """The recipe cut down to two steps, with every method at work from the first and the files it asks for at hand."""
    recipe = load_recipe(name)
    keys = {**TINY, **changes}
    small = NARROW if recipe.data.name == "cifar10" else {}
    keys |= named_runs(recipe, helper=small, **keys)
    if recipe.attack.name in ("gaussian", "guided"):  # noise takes no steps, GAT's attack one
        keys.pop("attack.steps")
    if "awp" in [f.name for f in recipe.flatness]:
        keys["flatness.awp.warmup"] = 0
    if recipe.data.extra is not None:
        file = folder.parent / "extra.npz"
        keys["data.extra.file"] = str(file)
        np.savez(file, image=np.zeros((2, 32, 32, 3), np.uint8), label=np.array([0, -1]))
    return load_recipe(name, keys)


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
def test_small_recipes_train_and_stop_after_two_steps(name: str, run_folder: Path, named_runs: NamedRuns) -> None:
    changes = {"train.epochs": 3, "data.held_out": 20, "train.tensorboard": True}
    recipe = tiny(name, run_folder, named_runs, **changes)
    run = train(build_job(recipe, folder=run_folder))
    assert run.status == "truncated"
    assert [r.step for r in run.records] == [2]
    assert (run_folder / "last.safetensors").is_file()


@pytest.mark.parametrize("name", QUICK)
def test_two_steps(name: str, made_up_data: list[tuple[str, str]], run_folder: Path, named_runs: NamedRuns) -> None:
    large = {"wide_resnet": NARROW, "vit": FEW_TOKENS, "hybrid": THIN_HYBRID}.items()
    network = load_recipe(name).model.name
    small = next((keys for beginning, keys in large if network.startswith(beginning)), {})
    recipe = tiny(name, run_folder, named_runs, **small)
    made_up_data.clear()  # of the runs it names
    check_two_steps(build_job(recipe, folder=run_folder))
    assert made_up_data == [(recipe.data.name, "train")]


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.usefixtures("made_up_data")
def test_whole_runs_end_with_their_files(name: str, run_folder: Path, named_runs: NamedRuns) -> None:
    job = build_job(tiny(name, run_folder, named_runs), folder=run_folder)
    before = weights(job)
    run = train(job)
    assert run.status == "truncated"
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(job), strict=True))
    assert (run_folder / "last.safetensors").is_file()
