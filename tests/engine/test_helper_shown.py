"""HAT's third pass where it is easily forgotten: averages, methods that look, guarded steps, what a run tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flatrock.core.hooks import Flatness, Look, Penalty
from flatrock.core.types import View
from flatrock.engine.average import averaged
from flatrock.engine.craft import craft
from flatrock.engine.folder import RunFolder
from flatrock.engine.helper import Helper
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.loss import Stage
from flatrock.engine.runner import Runner
from flatrock.engine.step import train_step

SWA = {"name": "swa", "decay": 0.8, "bn": "recompute", "batches": 2}


def test_an_average_is_passed_what_a_loss_is_passed(hat: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean inputs, the last point of a walk, and what lies beyond it."""
    job = hat(flatness=[SWA], attack={"name": "langevin", "steps": 3})
    batches = list(job.loader.epoch(0))[:2]
    train_step(job, batches[0], step=0, guard=True)
    assert job.averaging is not None
    passed: list[tuple[Tensor, ...]] = []
    views = Runner.views

    def noted(runner: Runner, *inputs: Tensor) -> tuple[View, ...]:
        passed.append(inputs)
        return views(runner, *inputs)

    monkeypatch.setattr(Runner, "views", noted)
    with averaged(job, replace_bn(job.averaging), step=0):
        walks = [craft(Stage(job, b.x, b.y, b.ids, job.moment(0)), {}) for b in batches]
    assert passed == [], "a copy of the live statistics asks nobody"
    with averaged(job, job.averaging, step=0):
        pass
    assert len(passed) == 2
    for batch, walk, (x, x_adv, beyond) in zip(batches, walks, passed, strict=True):
        assert len(walk) > 1
        assert torch.equal(x, batch.x)
        assert torch.equal(x_adv, walk[-1].x_adv)
        assert not torch.equal(x_adv, walk[0].x_adv)
        assert torch.equal(beyond, batch.x + 2 * (x_adv - batch.x))


def replace_bn(method: Flatness) -> Flatness:
    """The same average with the statistics of the live weights."""
    copy = type(method)(decay=0.8)  # type: ignore[call-arg]
    copy.restore(method.state())
    return copy


def test_methods_are_shown_the_helpers_inputs(hat: Callable[..., Job]) -> None:
    looks: list[Look] = []

    class Spy(Flatness):
        def in_loss(self, look: Look) -> Penalty | None:
            looks.append(look)
            return None

    job = replace(hat(), flatness={"spy": Spy()})
    job.model.train()
    train_step(job, next(iter(job.loader.epoch(0))), step=0, guard=True)
    (look,) = looks
    assert look.x_helper is not None
    assert torch.equal(look.x_helper, look.x + 2 * (look.x_adv - look.x))


def test_the_copy_is_looked_at_in_guarded_steps_only(hat: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(Helper, "check", lambda self, x: looked.append(len(x)))
    job = hat()
    batch = next(iter(job.loader.epoch(0)))
    train_step(job, batch, step=0, guard=False)
    assert looked == []
    train_step(job, batch, step=0, guard=True)
    assert looked == [len(batch.ids)]


def test_a_run_tells_what_its_helper_could_not_do(hat: Callable[..., Job]) -> None:
    job = hat(train__epochs=1)
    assert job.helper is not None
    job.helper.findings["T05"] = "the helper's float16 copy overflows; the network itself is asked"
    run = train(job)
    (told,) = RunFolder(run.folder).read_info()["findings"]
    assert told.startswith("T05 the helper's float16 copy overflows")
