"""Losses at several points of a walk: compiled, their passes share a graph where the network allows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.engine.job import Job
from flatrock.engine.runner import Engine, Runner
from flatrock.engine.step import train_step

MakeJob = Callable[..., Job]
SIZE = 16


def walk(steps: int) -> dict[str, Any]:
    return {"name": "langevin", "steps": steps, "step_size": 0.05, "average": 0.4}


class Compiler:
    """Stands in for torch.compile: does what it is given, and notes how many rows each pass of a loss had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        monkeypatch.setattr(torch, "compile", self)

    def __call__(self, work: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def noted(*inputs: Tensor) -> Any:
            if not any(x.requires_grad for x in inputs):  # of an attack they do
                self.rows.append(sum(len(x) for x in inputs))
            return work(*inputs)

        return noted


def compiled(job: Job, *, most: int | None = None) -> Job:
    return replace(job, runner=Runner(job.model, Engine(compile=True), size=SIZE, most=most))


def step(job: Job) -> dict[str, float]:
    job.model.train()
    outcome = train_step(job, next(iter(job.loader.epoch(0))), step=0, guard=True)
    return {name: float(value) for name, value in outcome.losses.items()}


@pytest.mark.parametrize(
    ("keys", "steps", "passes"),
    [
        ({"objective": {"name": "at"}}, 10, [5 * SIZE] * 2),
        ({"objective": {"name": "at"}}, 6, [6 * SIZE]),
        ({"objective": {"name": "at"}}, 7, [SIZE] * 7),  # 4 and 3 would be compiled one after the other
        ({"objective": {"name": "trades", "beta": 3}}, 4, [2 * 2 * SIZE] * 2),
        ({"objective": {"name": "trades", "beta": 3}, "flatness": ["rat", "trh"]}, 6, [3 * 2 * SIZE] * 2),
        ({"objective": {"name": "mart"}}, 3, [3 * 2 * SIZE]),
        ({"objective": {"name": "at"}, "flatness": ["awp"]}, 4, [4 * SIZE] * 2),  # AWP's own gradient comes first
        ({"objective": {"name": "at"}, "flatness": ["awp"]}, 10, [5 * SIZE] * 4),
        ({"objective": {"name": "at"}, "train__clip_norm": 0.5}, 4, [4 * SIZE]),
    ],
)
def test_points_share_a_graph_and_leave_what_they_leave_alone(
    make_job: MakeJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    steps: int,
    passes: list[int],
) -> None:
    """Gradients, statistics of every BatchNorm, in the order of the walk, losses."""
    keys = {**keys, "attack": walk(steps), "train__batch_size": SIZE}
    plain = make_job(tmp_path / "a", **keys)
    expected = step(plain)
    compiler, job = Compiler(monkeypatch), compiled(make_job(tmp_path / "b", **keys))
    assert step(job) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert compiler.rows == passes
    assert job.runner.findings == {}
    for (name, a), b in zip(job.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)
    for (name, p), q in zip(job.model.named_parameters(), plain.model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert float((p.grad - q.grad).norm()) <= 1e-5 * float(q.grad.norm()) + 1e-7, name


@pytest.mark.parametrize(("steps", "times"), [(4, 0), (10, 1), (7, 1)])
def test_gradients_leave_the_memory_of_compiled_passes_once(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, times: int
) -> None:
    """Before the second group adds to what the first one left, which the compiler's memory holds until then."""
    Compiler(monkeypatch)
    job = compiled(make_job(tmp_path / "run", attack=walk(steps), train__batch_size=SIZE))
    settled: list[bool] = []
    monkeypatch.setattr(job.runner, "settle", lambda: settled.append(True))
    step(job)
    assert len(settled) == times


def test_one_by_one_in_parts_and_where_rows_depend_on_each_other(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for parts is short of memory; dropout would toss other coins for batches that pass together."""
    compiler = Compiler(monkeypatch)
    keys: dict[str, Any] = {"attack": walk(4), "train__batch_size": SIZE}
    for most in (8, SIZE):
        compiler.rows.clear()
        step(compiled(make_job(tmp_path / f"parts of {most}", **keys), most=most))
        assert set(compiler.rows) == {most}
    compiler.rows.clear()
    job = make_job(tmp_path / "dropout", **keys)
    job.model.add_module("coins", nn.Dropout(0.5))
    forward = job.model.features
    monkeypatch.setattr(job.model, "features", lambda x: job.model.coins(forward(x)))  # type: ignore[operator]
    tossed = compiled(job)
    step(tossed)
    assert compiler.rows == [SIZE] * 4
    assert list(tossed.runner.findings) == ["T04"]
    assert "passes at several points of a walk are compiled one by one" in tossed.runner.findings["T04"]


class Held:
    """How many bytes graphs hold at once, at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __enter__(self) -> Held:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Any:
        held = self

        class Kept:
            def __init__(self) -> None:
                self.tensor = tensor
                held.now += tensor.nbytes
                held.most = max(held.most, held.now)

            def __del__(self) -> None:
                held.now -= tensor.nbytes

        return Kept()


@pytest.mark.parametrize(("fast", "batches"), [(False, 1), (True, 5)])
@pytest.mark.parametrize("flatness", [[], ["awp"]])
def test_no_more_graphs_are_held_than_share_one(
    make_job: MakeJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flatness: list[str],
    fast: bool,
    batches: int,
) -> None:
    """AWP's own gradient included: ten points take what one takes, or five if they are compiled."""
    Compiler(monkeypatch)
    most = {}
    for steps in (1, 10):
        keys: dict[str, Any] = {"attack": walk(steps), "train__batch_size": SIZE, "flatness": flatness}
        job = make_job(tmp_path / f"{steps}", **keys)
        with Held() as held:
            step(compiled(job) if fast else job)
        most[steps] = held.most
    assert most[10] <= 1.3 * batches * most[1]
