"""How a run fails: loudly, by name, and with the last good state intact."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatrock.core.errors import StateError, TrainingError
from flatrock.core.tensorfile import load
from flatrock.core.types import Parts, Views
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.step import StepOutcome
from flatrock.engine.watch import GPU_ASKED_EVERY, Watch
from flatrock.recipes.restore import load as load_model

MakeJob = Callable[..., Job]
Shot = Callable[[Path], dict[str, Any]]


class Spoiled:
    """An objective one of whose terms takes a given value in a given call."""

    def __init__(self, inner: Any, *, step: int, term: str, value: float) -> None:
        self.passes, self.inner_loss, self.hard_labels = inner.passes, inner.inner_loss, inner.hard_labels
        self.inner, self.step, self.term, self.value, self.calls = inner, step, term, value, 0

    def loss(self, views: Views, y: Tensor) -> Parts:
        parts: Parts = self.inner.loss(views, y)
        self.calls += 1
        if self.calls != self.step + 1:
            return parts
        if self.term == "total":
            total = parts.total + self.value
            object.__setattr__(parts, "total", total)  # a sum that fails though its terms do not
            return parts
        return Parts({**parts.terms, self.term: torch.tensor(self.value)}, {**parts.weights, self.term: 0.0})


@pytest.mark.parametrize(
    ("term", "value", "save_seconds"),
    [("penalty", math.nan, 1e-9), ("penalty", math.inf, 1e9), ("total", math.nan, 1e9), ("total", -math.inf, 1e-9)],
)
def test_non_finite_loss(
    make_job: MakeJob,
    tmp_path: Path,
    snapshot: Shot,
    small_shot: dict[str, Any],
    term: str,
    value: float,
    save_seconds: float,
) -> None:
    """Step 4 (counted from 0): second epoch. The state from before it is good, and healthy training goes on from it."""
    job = make_job(tmp_path / "run", train__save_seconds=save_seconds)
    spoiled = replace(job, objective=Spoiled(job.objective, step=4, term=term, value=value))
    with pytest.raises(
        TrainingError, match=rf"non-finite at step 4: term {term}; .*failed_batch .*the last finished epoch are kept$"
    ) as caught:
        train(spoiled)
    assert caught.value.__cause__ is not caught.value, "an error is not its own cause"
    folder = RunFolder(tmp_path / "run")
    info = folder.read_info()
    assert info["status"] == "failed"
    assert f"step 4: term {term}" in info["reason"]
    assert info["failed_batch"] == list(job.loader.epoch(1))[1].ids.tolist()
    assert (folder.run().status, folder.run().reason) == ("failed", info["reason"])
    tensors, meta = load(folder.state)
    assert 3 * meta["epoch"] + meta["step_in_epoch"] == (4 if save_seconds < 1 else 3)
    assert all(torch.isfinite(t).all() for t in tensors.values())
    with pytest.raises(StateError, match=r"FAILED \(the loss became non-finite at step 4.*; name a checkpoint file"):
        load_model(tmp_path / "run")
    train(make_job(tmp_path / "run", train__save_seconds=save_seconds), resume=True)
    assert "failed_batch" not in folder.read_info()
    assert snapshot(tmp_path / "run") == small_shot


def test_a_failed_run_fails_again_when_resumed(make_job: MakeJob, tmp_path: Path) -> None:
    def spoiled() -> Job:
        job = make_job(tmp_path / "run")
        return replace(job, objective=Spoiled(job.objective, step=0, term="penalty", value=math.nan))

    for resume in (False, True):
        with pytest.raises(
            TrainingError, match=r"step 0: term penalty; .*\. No epoch was finished: there are no weights"
        ):
            train(spoiled(), resume=resume)
        assert RunFolder(tmp_path / "run").read_info()["status"] == "failed"
        with pytest.raises(StateError, match=r"FAILED \(.*\); train it again$"):
            load_model(tmp_path / "run")


@pytest.mark.parametrize("lr", [1e8, 1e18, 1e30, 1e38])
@pytest.mark.parametrize(("batch_size", "every"), [(16, 1), (48, 1), (48, 100)])
def test_exploding_weights_fail(plain_job: MakeJob, tmp_path: Path, lr: float, batch_size: int, every: int) -> None:
    """However the explosion shows itself first (loss, weights, probe, attack), the run is marked failed."""
    training = {"train__batch_size": batch_size, "train__epochs": 8, "select__every": every}
    job = plain_job(tmp_path / "run", optimizer__lr=lr, schedule={"name": "constant"}, **training)
    with pytest.raises(TrainingError, match=r"non-finite|NaN|collapsed"):
        train(job)
    folder = RunFolder(tmp_path / "run")
    assert folder.read_info()["status"] == "failed"
    tensors, _ = load(folder.state)
    assert all(torch.isfinite(t).all() for t in tensors.values())


def test_statistics_that_overflow_fail(plain_job: MakeJob, tmp_path: Path, listener: Callable[..., Any]) -> None:
    """The weights are finite but BatchNorm's running statistics are not: eval mode returns NaN."""
    job = plain_job(tmp_path / "run", train__save_seconds=1e-9)

    def poison(step: int) -> None:
        if step == 3:  # the end of the first epoch, so that the probe meets it
            job.model.bn1.running_var.fill_(math.nan)  # type: ignore[union-attr, operator]

    with pytest.raises(TrainingError, match=r"non-finite|NaN"):
        train(job, progress=listener(poison))
    tensors, _ = load(tmp_path / "run" / "state.safetensors")
    assert all(torch.isfinite(t).all() for t in tensors.values()), "the last good state is kept"
    assert RunFolder(tmp_path / "run").read_info()["status"] == "failed"


def one_class(job: Job) -> Job:
    """Weights that call everything a 3, and a rate of 0 that keeps them."""
    with torch.no_grad():
        job.model.head.weight.zero_()  # type: ignore[union-attr, operator]
        job.model.head.bias.copy_(torch.eye(10)[3])  # type: ignore[union-attr, operator]
    return job


def test_collapsed_run_fails(plain_job: MakeJob, tmp_path: Path) -> None:
    job = one_class(plain_job(tmp_path / "run", optimizer__lr=0, train__epochs=2))
    with pytest.raises(TrainingError, match="the run collapsed: the model predicts one class"):
        train(job)
    folder = RunFolder(tmp_path / "run")
    assert folder.read_info()["status"] == "failed"
    records = folder.records()
    assert [(r.collapsed, r.best_epoch) for r in records] == [(True, None)] * 2
    assert records[0].clean == pytest.approx(0.1), "4 of 40 held-out samples are a 3"
    assert not folder.best.exists()
    with pytest.raises(StateError, match=r"FAILED .*collapsed"):
        load_model(tmp_path / "run")
    with pytest.raises(TrainingError, match="the run collapsed"):
        train(plain_job(tmp_path / "run", optimizer__lr=0, train__epochs=2), resume=True)


class FullDisk:
    """Refuses to write files of one name from the moment it is full."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, *, how: str) -> None:
        self.full = False
        self.refused: list[str] = []
        fsync, opened = os.fsync, Path.open
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def refuse(file: str) -> None:
            if self.full and Path(file).name in (name, f".{name}.part"):
                self.refused.append(file)
                raise error

        def checked_fsync(descriptor: int) -> None:
            refuse(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            fsync(descriptor)

        def checked_open(file: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            if set(mode) & set("wa"):
                refuse(str(file))
            return opened(file, mode, *args, **options)

        if how == "fsync":
            patch.setattr(os, "fsync", checked_fsync)
        else:
            patch.setattr(Path, "open", checked_open)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("best.safetensors", "fsync"),
        ("last.safetensors", "fsync"),
        ("epoch-0002.safetensors", "open"),
        ("state.safetensors", "fsync"),
        ("state.safetensors", "open"),
        ("metrics.jsonl", "open"),
    ],
)
def test_full_disk(
    make_job: MakeJob,
    tmp_path: Path,
    listener: Callable[..., Any],
    snapshot: Shot,
    small_shot: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    how: str,
) -> None:
    """The disk is full at the end of epoch 2: the error names the file, what was there is intact, resuming works."""
    folder = RunFolder(tmp_path / "run")
    before: dict[str, bytes] = {}

    with monkeypatch.context() as patch:
        disk = FullDisk(patch, name, how=how)

        def fill(step: int) -> None:
            if step == 6:
                disk.full = True
                before.update({f.name: f.read_bytes() for f in folder.path.iterdir()})

        with pytest.raises(StateError, match=rf"could not write .*{name}.*No space left on device.*--resume"):
            train(make_job(folder.path), progress=listener(fill))
        assert disk.refused
    if name in before:
        assert (folder.path / name).is_file(), "the message says that the previous file is intact"
        assert (folder.path / name).read_bytes() == before[name]
    states = [f.read_bytes() for f in (folder.state, folder.older_state) if f.exists()]
    assert before["state.safetensors"] in states
    assert not list(folder.path.glob(".*.part")), "half a file stays behind and fills the disk further"
    assert [r.epoch for r in folder.records()] in ([1], [1, 2])
    train(make_job(folder.path), resume=True)
    assert snapshot(folder.path) == small_shot


def test_full_disk_from_the_start(make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch, "run.json", how="fsync")
    disk.full = True
    with pytest.raises(StateError, match=r"could not write .*run\.json .*No space left on device"):
        train(make_job(tmp_path / "run"))
    assert list((tmp_path / "run").iterdir()) == []


def outcome(value: float) -> StepOutcome:
    losses = {"total": torch.tensor(value), "ce": torch.tensor(value)}
    return StepOutcome(losses, right=torch.tensor(1), labelled=torch.tensor(2), samples=2)


def test_watch_checks_at_once_on_the_cpu() -> None:
    watch = Watch()
    for step in range(3):
        watch.see(outcome(1.0), step)
    with pytest.raises(TrainingError, match="at step 3: term ce;"):
        watch.see(outcome(math.nan), 3)
    assert GPU_ASKED_EVERY <= 100, "a broken run on a GPU is noticed within this many steps"


def test_watch_round_trip_is_exact() -> None:
    """The sums pass through JSON and go on to the same bits."""
    import json

    values = [0.1, 1 / 3, 2e-17, 1e9]
    whole, half = Watch(), Watch()
    for i, v in enumerate(values):
        whole.see(outcome(v), i)
        half.see(outcome(v), i)
        half = Watch.restored(json.loads(json.dumps(half.state())), torch.device("cpu"))
    assert whole.means() == half.means()
    assert whole.state() == half.state()
    assert whole.means().keys() == {"total", "ce"}
    assert whole.accuracy() == 0.5
