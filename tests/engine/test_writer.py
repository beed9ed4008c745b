"""Checkpoints stored by a thread beside training: the same files, in order, and no failure goes unheard."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flatrock.core import tensorfile
from flatrock.core.errors import ModelError, StateError, TrainingError
from flatrock.core.progress import Silent
from flatrock.core.tensorfile import load
from flatrock.engine import loop
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.state import TrainState, check_finite
from flatrock.engine.writer import Writer
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe

MakeJob = Callable[..., Job]


def test_it_stores_what_the_tensors_held_when_they_were_given(tmp_path: Path) -> None:
    gate = threading.Event()
    tensor = torch.arange(3.0)
    with Writer(beside=True) as writer:
        writer.do(lambda: assert_set(gate))
        writer.save(tmp_path / "a.safetensors", {"t": tensor}, {"n": 1})
        tensor.zero_()  # while nothing is stored yet
        assert not (tmp_path / "a.safetensors").exists()
        gate.set()
        writer.wait()
        tensors, meta = load(tmp_path / "a.safetensors")
    assert (tensors["t"].tolist(), meta) == ([0.0, 1.0, 2.0], {"n": 1})


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(30)


def test_one_thread_keeps_the_order_and_without_it_nothing_is_put_off() -> None:
    done: list[int] = []
    with Writer(beside=True) as writer:
        for i in range(50):
            writer.do(partial(done.append, i))
    assert done == list(range(50)), "the end waits"
    here = Writer(beside=False)
    here.do(lambda: done.append(threading.get_ident()))
    assert done[-1] == threading.get_ident()


def fail(text: str) -> None:
    raise StateError(text)


def test_after_a_failure_nothing_more_is_stored_and_it_is_told() -> None:
    done: list[str] = []
    gate = threading.Event()
    writer = Writer(beside=True)
    writer.do(lambda: assert_set(gate))
    writer.do(partial(fail, "no space"))
    writer.do(partial(done.append, "a state that counts on it"))
    gate.set()
    with pytest.raises(StateError, match="no space"):
        writer.wait()
    with pytest.raises(StateError, match="no space"):
        writer.do(partial(done.append, "later"))
    with pytest.raises(StateError, match="no space"), writer:
        pass
    assert done == []


def test_an_error_of_training_is_not_hidden_by_one_of_the_disk() -> None:
    with pytest.raises(TrainingError, match="training"), Writer(beside=True) as writer:
        writer.do(partial(fail, "no space"))
        raise TrainingError("training")


def test_an_error_of_the_disk_is_told_beside_one_of_training() -> None:
    told: list[str] = []
    with pytest.raises(TrainingError, match="training"), Writer(beside=True, say=told.append) as writer:
        writer.do(partial(fail, "no space"))
        raise TrainingError("training")
    assert told == ["since the last checkpoint nothing was stored: no space"]
    with pytest.raises(StateError, match="no space"), Writer(beside=True, say=told.append) as writer:
        writer.do(partial(fail, "no space"))
        writer.wait()
    assert len(told) == 1, "not twice"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on the CPU with the thread that trainings on a GPU have."""
    monkeypatch.setattr(loop, "Writer", lambda *, beside, say: Writer(beside=True, say=say))


def content(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"lines": [r.to_dict() for r in RunFolder(folder).records()]}
    for line in found["lines"]:
        del line["seconds"], line["images_per_second"], line["elapsed"]
    for file in sorted(folder.glob("*.safetensors")):
        tensors, meta = load(file)
        found[file.name] = {k: v.tolist() for k, v in tensors.items()}, meta["role"], meta.get("epoch")
    return found


def test_the_files_of_a_run_are_those_of_one_without_the_thread(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swa = [{"name": "swa", "decay": 0.9}]
    options = {"train__save_seconds": 1e-9, "train__keep": {"every": 1}, "flatness": swa}
    train(make_job(tmp_path / "plain", **options))
    monkeypatch.setattr(loop, "Writer", lambda *, beside, say: Writer(beside=True, say=say))
    train(make_job(tmp_path / "thread", **options))
    plain, thread = content(tmp_path / "plain"), content(tmp_path / "thread")
    assert plain.keys() == thread.keys()
    assert plain.keys() >= {
        "best.safetensors",
        "last.safetensors",
        "state.older.safetensors",
        "average-last.safetensors",
    }
    assert plain == thread


def test_training_does_not_wait_for_the_disk(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first epoch is not stored before the last step of the second has run, and the lock outlives the thread."""
    stepped, locked = threading.Event(), []
    real = tensorfile.save

    def slow(path: Path, *args: Any, **options: Any) -> None:
        if path.name != "state.safetensors" or path.exists():  # all but the first state
            assert_set(stepped)
        locked.append((path.parent / ".lock").exists())
        real(path, *args, **options)

    class Listener(Silent):
        steps = 0

        def advance(self, units: int, note: str = "") -> None:
            self.steps += units
            if self.steps == 2 * len(job.loader):
                stepped.set()

    monkeypatch.setattr("flatrock.engine.writer.save", slow)
    monkeypatch.setattr(loop, "Writer", lambda *, beside, say: Writer(beside=True, say=say))
    job = make_job(tmp_path / "run", train__epochs=2)
    train(job, progress=Listener())
    assert len(locked) >= 5
    assert all(locked)
    assert len(RunFolder(tmp_path / "run").records()) == 2


@pytest.mark.usefixtures("beside")
def test_nothing_is_trained_into_a_folder_that_takes_nothing(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int) -> None:
        if ".state.safetensors" in Path(f"/proc/self/fd/{handle}").readlink().name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(loop, "take_step", lambda *_, **__: pytest.fail("a step was made"))
    with pytest.raises(StateError, match="No space left"):
        train(make_job(tmp_path / "run"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_only_a_gpu_has_the_thread(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    asked: list[bool] = []

    def noted(*, beside: bool, say: Any) -> Writer:
        asked.append(beside)
        return Writer(beside=beside, say=say)

    monkeypatch.setattr(loop, "Writer", noted)
    job = make_job(tmp_path / "run", train__epochs=1)
    if device == "cuda":
        recipe = load_recipe("digits_standard", {"train.epochs": 2})
        job = build_job(recipe, folder=tmp_path / "gpu", device=device)
    train(job)
    assert asked == [device == "cuda"]


@pytest.mark.usefixtures("beside")
def test_a_full_disk_ends_training_and_leaves_the_last_state(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the second epoch cannot be stored: neither is the state that counts on them, nor its line."""
    synced, real = [0], os.fsync

    def full(handle: int) -> None:
        name = Path(f"/proc/self/fd/{handle}").readlink().name
        if ".last.safetensors" in name:
            synced[0] += 1
            if synced[0] == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match="No space left"):
        train(make_job(tmp_path / "run"))
    folder = RunFolder(tmp_path / "run")
    assert load(folder.state)[1]["epoch"] == 1
    assert len(folder.records()) == 1
    monkeypatch.setattr(os, "fsync", real)
    again = train(make_job(tmp_path / "run"), resume=True)
    whole = train(make_job(tmp_path / "whole"))
    assert [r.terms for r in again.records] == [r.terms for r in whole.records]


@pytest.mark.usefixtures("beside")
def test_a_run_that_fails_waits_for_what_it_has_to_say(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of the first epoch are still being stored when the second fails; they are kept, as the reason says."""
    failing = threading.Event()
    real = tensorfile.save

    def slow(path: Path, *args: Any, **options: Any) -> None:
        if path.name != "state.safetensors" or path.exists():  # all but the first state
            assert_set(failing)
        real(path, *args, **options)

    class Listener(Silent):
        steps = 0

        def advance(self, units: int, note: str = "") -> None:
            self.steps += units
            if self.steps == len(job.loader) + 1:
                failing.set()
                raise ModelError("it broke")

    monkeypatch.setattr("flatrock.engine.writer.save", slow)
    job = make_job(tmp_path / "run", train__epochs=2)
    with pytest.raises(TrainingError, match=r"it broke\. The weights of the last finished epoch are kept"):
        train(job, progress=Listener())


@pytest.mark.gpu
def test_what_is_stored_may_lie_on_two_devices() -> None:
    """As the averaged weights on a GPU and their counter."""
    check_finite({"weights": torch.ones(3, device="cuda"), "updates": torch.ones(())})
    for device in ("cpu", "cuda"):
        bad = torch.full((2,), torch.inf, device=device)
        with pytest.raises(TrainingError, match="bad became non-finite"):
            check_finite({"weights": torch.ones(3, device="cuda"), "updates": torch.ones(()), "bad": bad})


@pytest.mark.parametrize(
    ("state", "when"),
    [
        (None, "non-finite; lower"),
        (TrainState(epoch=2, step_in_epoch=7), "non-finite by step 7 of epoch 3; lower"),
        (TrainState(epoch=2), "non-finite by the end of epoch 2; lower"),
    ],
)
def test_what_is_not_finite_is_told_with_its_time(state: TrainState | None, when: str) -> None:
    with pytest.raises(TrainingError, match=f"running_var became {when}"):
        check_finite({"running_var": torch.tensor(float("nan"))}, state)
