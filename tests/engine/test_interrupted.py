"""Runs that are stopped say so, and by what; who listens to epochs hears them once they are stored."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flatrock.core import locks
from flatrock.core.errors import StateError, TrainingError
from flatrock.core.processes import Terminated, terminable
from flatrock.core.runs import EpochRecord
from flatrock.core.tensorfile import load
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job
from flatrock.engine.loop import train

MakeJob = Callable[..., Job]
Shot = Callable[..., dict[str, Any]]


def status(folder: Path) -> tuple[str, str]:
    info = RunFolder(folder).read_info()
    return info["status"], info["reason"]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (KeyboardInterrupt(), "Ctrl-C"),
        (Terminated(), "SIGTERM"),
        (SystemExit(1), "SystemExit"),
        (StateError("could not write it: no space left"), "could not write it: no space left"),
        (BrokenPipeError(32, "Broken pipe"), "BrokenPipeError: [Errno 32] Broken pipe"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_stops_a_run_is_noted_and_nothing_is_lost(
    make_job: MakeJob,
    tmp_path: Path,
    listener: Callable[..., Any],
    snapshot: Shot,
    small_shot: dict[str, Any],
    error: BaseException,
    why: str,
) -> None:
    folder = tmp_path / "run"

    def at(steps: int) -> None:
        if steps == 5:
            raise error

    with pytest.raises(type(error)) as caught:
        train(make_job(folder), progress=listener(at))
    assert caught.value is error
    assert status(folder) == ("interrupted", why)
    assert RunFolder(folder).unfinished() == f"interrupted: {why}"
    assert not RunFolder(folder).failure.exists()
    assert train(make_job(folder), resume=True).status == "finished"
    assert status(folder) == ("finished", "")
    assert RunFolder(folder).unfinished() == ""
    assert snapshot(folder) == small_shot


def test_a_disk_too_full_to_note_it_hides_nothing(
    make_job: MakeJob, tmp_path: Path, stopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunFolder.write_info

    def full(self: RunFolder, **values: Any) -> None:
        if values.get("status") == "interrupted":
            raise StateError("could not write run.json: no space left")
        write(self, **values)

    monkeypatch.setattr(RunFolder, "write_info", full)
    with pytest.raises(KeyboardInterrupt):
        train(make_job(tmp_path / "run"), progress=stopper(5))
    assert status(tmp_path / "run")[0] == "running"
    assert RunFolder(tmp_path / "run").unfinished() == "its process is gone"


def test_a_refused_resumption_changes_no_word(make_job: MakeJob, tmp_path: Path, stopper: Any) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(make_job(folder), progress=stopper(5))
    before = RunFolder(folder).info.read_bytes()
    with pytest.raises(StateError, match="belongs to another recipe"):
        train(make_job(folder, seed=9), resume=True)
    assert RunFolder(folder).info.read_bytes() == before


def test_epochs_are_heard_once_they_are_stored(
    make_job: MakeJob, tmp_path: Path, snapshot: Shot, small_shot: dict[str, Any]
) -> None:
    """And listening, even with random numbers drawn, changes no bit of the run."""
    folder, heard = tmp_path / "run", list[EpochRecord]()

    def hear(record: EpochRecord) -> None:
        assert RunFolder(folder).records()[-1] == record
        assert load(folder / "last.safetensors")[1]["record"]["epoch"] == record.epoch
        torch.rand(3)
        heard.append(record)

    run = train(make_job(folder), on_epoch=hear)
    assert tuple(heard) == run.records
    assert snapshot(folder) == small_shot


@pytest.mark.parametrize("error", [ValueError("no network"), TrainingError("enough"), KeyboardInterrupt()])
def test_what_a_listener_raises_interrupts_the_run(
    make_job: MakeJob, tmp_path: Path, snapshot: Shot, small_shot: dict[str, Any], error: BaseException
) -> None:
    folder, heard = tmp_path / "run", list[int]()

    def hear(record: EpochRecord) -> None:
        heard.append(record.epoch)
        if record.epoch == 2 and len(heard) == 2:
            raise error

    with pytest.raises(type(error)) as caught:
        train(make_job(folder), on_epoch=hear)
    assert caught.value is error, "as it is, so that whoever raised it can tell it"
    assert status(folder)[0] == "interrupted"
    assert len(RunFolder(folder).records()) == 2
    train(make_job(folder), resume=True, on_epoch=hear)
    assert heard == [1, 2, 3, 4]
    assert snapshot(folder) == small_shot


def test_live_and_dead_are_told_apart(make_job: MakeJob, tmp_path: Path) -> None:
    folder, told = RunFolder(tmp_path / "run"), []
    train(make_job(tmp_path / "run"), on_epoch=lambda record: told.append(folder.unfinished()))
    assert set(told) == {"a process is training it now"}
    folder.write_info(status="running")
    assert folder.unfinished() == "its process is gone"
    folder.lock.write_text("1234 is training into")  # what kill -9 leaves
    assert folder.unfinished() == "its process is gone"
    assert folder.lock.exists()


def test_where_there_are_no_locks_nothing_is_claimed(
    make_job: MakeJob, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / ".lock"
    assert locks.is_held(lock) is False
    lock.touch()
    assert locks.is_held(lock) is False
    monkeypatch.setattr(locks, "fcntl", None)
    assert locks.is_held(lock) is None


def test_sigterm_is_heard_once_and_only_inside() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as caught, terminable():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # while something is put away
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_listens_for_sigterm_already_goes_on_listening() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with terminable():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_a_thread_can_train(make_job: MakeJob) -> None:
    """Python lets no thread but the first listen for signals."""
    done: list[bool] = []

    def inside() -> None:
        with terminable():
            done.append(True)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert done == [True]
