"""Steps on the meta device, where nothing can be read: whoever would wait for a GPU is found on any machine.

What only a GPU can show is in test_cuda.py: kernels of our own, recordings, noise of its generator, HAT's helper.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_cases import Waits
from torch import Tensor

from flatrock.core.rng import Seed
from flatrock.data.augment import Augmentation, cutmix, mixup
from flatrock.data.dataset import Dataset
from flatrock.data.loader import TensorLoader
from flatrock.engine.job import Job
from flatrock.engine.step import train_step
from flatrock.recipes.build import build_job
from flatrock.recipes.schema import Recipe

MakeRecipe = Callable[..., Recipe]
NONE = {"attack": {"name": "none"}}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "standard": NONE,
    "at": {},
    "trades": {},
    "mart": {},
    "alp": {},
    "gat": {"attack": {"name": "guided"}},
}
FLATNESS: dict[str, list[dict[str, Any]]] = {
    "awp": [{"name": "awp", "gamma": 0.01}],
    "sam": [{"name": "sam"}],
    "rat": [{"name": "rat", "sigma": 0.0}],  # only a CPU and a GPU have generators
    "trh": [{"name": "trh"}],
    "s2o": [{"name": "s2o"}],
    "swa": [{"name": "swa", "decay": 0.9}],
    "stack": [{"name": "awp", "gamma": 0.01}, {"name": "rat", "sigma": 0.0}, {"name": "swa", "decay": 0.9}],
}
REST: dict[str, dict[str, Any]] = {
    "l2": {"threat": {"norm": "l2", "eps": 0.5}},
    "batch statistics": {"attack": {"bn_mode": "train"}},
    "atent": {"attack": {"name": "langevin"}},
    "gaussian noise": {"attack": {"name": "gaussian"}},
    "noise on both inputs": {"objective": {"name": "trades"}, "attack": {"name": "smooth-pgd", "steps": 2}},
    "entropy_sgd": {"optimizer": {"name": "entropy_sgd"}},
    "sgld": {"optimizer": {"name": "sgld"}},
    "mixup": {"data__augment__mixup": 0.5},
    "cutmix": {"data__augment__cutmix": 0.5},
    "augmentation": {"data__augment": {"crop": 1, "flip": True, "cutout": 2, "rotation": 10, "erase": 0.5}},
    "label smoothing": {"objective": {"name": "at", "label_smoothing": 0.1}},
    "clean tick": {"train__clean_tick": True},
    "clipped gradients": {"train__clip_norm": 0.1},
    "parts": {"train__micro_batch": 6},
    "parts of a stack": {"train__micro_batch": 6, "objective": {"name": "trades"}, "flatness": FLATNESS["stack"]},
    "l1 and l2": {"optimizer": {"l1": 1e-4, "l2": 1e-4}},
}


def waits_of(job: Job, steps: int = 2) -> list[str]:
    """What steps after the first batch wait for; they fail if they look at a number or mix devices."""
    job.model.train()
    batches = iter(job.loader.epoch(0))
    next(batches)  # the order of an epoch is drawn on the CPU
    with Waits() as waits:
        for step in range(steps):
            train_step(job, next(batches), step=step, guard=False)
    return waits.found


@pytest.fixture
def waits(make_recipe: MakeRecipe, tmp_path: Path) -> Callable[..., list[str]]:
    """What a step of the small recipe with overrides waits for."""

    def look(**overrides: Any) -> list[str]:
        return waits_of(build_job(make_recipe(**overrides), folder=tmp_path / "run", device="meta"))

    return look


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_objective_waits(waits: Callable[..., list[str]], objective: str) -> None:
    assert waits(objective={"name": objective}, **OBJECTIVES[objective]) == []


@pytest.mark.parametrize("objective", ["at", "trades", "mart"])
@pytest.mark.parametrize("method", FLATNESS)
def test_no_flatness_method_waits(waits: Callable[..., list[str]], objective: str, method: str) -> None:
    assert waits(objective={"name": objective}, flatness=FLATNESS[method]) == []


@pytest.mark.parametrize("case", REST)
def test_nothing_else_waits(waits: Callable[..., list[str]], case: str) -> None:
    assert waits(**REST[case]) == []


def test_extra_samples_come_without_waiting() -> None:
    data = Dataset("toy", torch.zeros(40, 1, 6, 6, dtype=torch.uint8), torch.arange(40) % 5, 5)
    loader = TensorLoader(
        data,
        batch_size=8,
        seed=Seed(1),
        augmentation=Augmentation(flip=True),
        device="meta",
        extra=data,
        extra_fraction=0.5,
    )
    batches = iter(loader.epoch(0))
    next(batches)
    with Waits() as waits:
        assert [batch.x.shape[0] for batch in batches] == [8] * 4
    assert waits.found == []


def test_whoever_reads_a_number_fails(make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = build_job(make_recipe(), folder=tmp_path / "run", device="meta")
    objective = type(job.objective)
    true = objective.loss

    def reading(self: Any, *args: Any) -> Any:
        found = true(self, *args)
        float(found.total.detach())
        return found

    monkeypatch.setattr(objective, "loss", reading)
    with pytest.raises(RuntimeError, match="meta"):
        waits_of(job)


def test_whoever_sends_a_number_and_waits_is_found() -> None:
    x, y = torch.empty(4, 1, 2, 2, device="meta"), torch.empty(4, 3, device="meta")
    with Waits() as waits:
        mixup(x, y, Seed(0), alpha=1.0)
        cutmix(x, y, Seed(0), alpha=1.0)
    assert waits.found == []

    def sent(values: Tensor) -> Tensor:
        return values.to("meta")

    with Waits() as waits:
        sent(torch.arange(4))
    assert waits.found == ["aten._to_copy.default"]


X = torch.empty(4, 3, device="meta")
ROWS = torch.tensor([0, 2])
THERE = torch.empty(2, dtype=torch.long, device="meta")
MASK = torch.empty(4, dtype=torch.bool, device="meta")
WAITING: dict[str, tuple[Callable[[], object], str]] = {
    "a list": (lambda: torch.tensor([1.0, 2.0], device="meta"), "tensor"),
    "a number": (lambda: torch.tensor(1.0, device="meta"), "tensor"),
    "a list like a tensor": (lambda: X.new_tensor([1.0]), "new_tensor"),
    "a list as a tensor": (lambda: torch.as_tensor([1.0], device="meta"), "as_tensor"),
    "rows named by the CPU": (lambda: X[ROWS], "aten.index.Tensor"),
    "rows selected by the CPU": (lambda: X.index_select(0, ROWS), "aten.index_select.default"),
    "rows of a list": (lambda: X[[0, 2]], "__getitem__"),
    "rows of a list written": (lambda: X.clone().__setitem__([0, 2], 1.0), "__setitem__"),
    "rows written by the CPU": (lambda: X.clone().__setitem__(ROWS, X[:2]), "aten.index_put_.default"),
    "a mask read": (lambda: X[MASK], "aten.index.Tensor"),
    "a mask written": (lambda: X.clone().__setitem__(MASK, X[:1]), "aten.index_put_.default"),
    "a copy into a tensor": (lambda: torch.empty_like(THERE).copy_(ROWS), "aten.copy_.default"),
}
GOING_ON: dict[str, Callable[[], object]] = {
    "rows named by the device": lambda: X[THERE],
    "rows named by numbers": lambda: X[1:, None, 2],
    "a row written": lambda: X.clone().__setitem__(1, 1.0),
    "a number beside a tensor": lambda: X * torch.tensor(2.0),
    "a number of the kernel": lambda: X.new_full((2,), 1.0),
    "a tensor that is there": lambda: torch.as_tensor(THERE),
    "a choice by mask": lambda: torch.where(MASK[:, None], X, 0.0),
    "a copy that goes on": lambda: (ROWS.to("meta", non_blocking=True), torch.empty_like(THERE).copy_(ROWS, True)),
}


@pytest.mark.parametrize("case", WAITING)
def test_every_way_to_wait_is_found(case: str) -> None:
    do, name = WAITING[case]
    with Waits() as waits, suppress(NotImplementedError):  # the meta device cannot count
        do()
    assert waits.found == [name]


@pytest.mark.parametrize("case", GOING_ON)
def test_what_does_not_wait_is_not_found(case: str) -> None:
    with Waits() as waits:
        GOING_ON[case]()
    assert waits.found == []
