"""TensorBoard shows the records: all of them, each once, also after stops."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatrock.core.errors import StateError
from flatrock.core.runs import Run
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.schedule import Schedule

MakeJob = Callable[..., Job]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of the run as TensorBoard itself reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def expected(run: Run) -> dict[str, list[tuple[int, float]]]:
    tags: dict[str, list[tuple[int, float]]] = {}
    for r in run.records:
        values = {
            **{k if k == "grad_norm" else f"loss/{k}": v for k, v in r.terms.items()},
            "lr": r.lr,
            "accuracy/running": r.running_accuracy,
            "accuracy/clean": r.clean,
            "accuracy/robust": r.robust,
            "accuracy/robust_gap": r.gap,
            "speed/images_per_second": r.images_per_second,
        }
        for tag, value in values.items():
            if value is not None:
                tags.setdefault(tag, []).append((r.epoch, pytest.approx(value, rel=1e-6)))
    return tags


def next_second() -> None:
    """Event files are named, and so ordered, by the second they were opened in."""
    time.sleep(1.02 - time.time() % 1)


def test_events_are_the_records(make_job: MakeJob, tmp_path: Path) -> None:
    keys = {"train__tensorboard": True, "train__epochs": 3, "select__every": 2, "train__clip_norm": 1}
    run = train(make_job(tmp_path / "run", **keys))
    assert "grad_norm" in scalars(tmp_path / "run")
    assert [r.robust is None for r in run.records] == [True, False, False]
    assert scalars(tmp_path / "run") == expected(run)


def test_no_folder_when_not_wanted(small_run: Path) -> None:
    assert not (small_run / "tensorboard").exists()


def test_no_step_twice_or_lost_after_a_resume(make_job: MakeJob, tmp_path: Path, stopper: Callable[[int], Any]) -> None:
    options = {"train__tensorboard": True, "train__save_seconds": 1e-9}
    with pytest.raises(KeyboardInterrupt):
        train(make_job(tmp_path / "run", **options), progress=stopper(8))
    next_second()
    run = train(make_job(tmp_path / "run", **options), resume=True)
    assert scalars(tmp_path / "run") == expected(run)


def test_no_step_twice_when_the_older_state_is_all_there_is(make_job: MakeJob, tmp_path: Path) -> None:
    """The only state left is that from before the first epoch, whose events lie on disk already."""
    train(make_job(tmp_path / "run", train__tensorboard=True, train__epochs=1))
    RunFolder(tmp_path / "run").state.write_bytes(b"")
    next_second()
    run = train(make_job(tmp_path / "run", train__tensorboard=True, train__epochs=1), resume=True)
    assert scalars(tmp_path / "run") == expected(run)


def test_no_step_lost_when_killed_before_its_event(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch counts once its state is stored; a stop between that and the event must not lose the event."""
    append = RunFolder.append

    def stop(self: RunFolder, record: Any, *rest: Any) -> None:
        append(self, record, *rest)
        if record.epoch == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "append", stop)
        train(make_job(tmp_path / "run", train__tensorboard=True, train__epochs=3))
    next_second()
    run = train(make_job(tmp_path / "run", train__tensorboard=True, train__epochs=3), resume=True)
    assert scalars(tmp_path / "run") == expected(run)


def test_overwrite_starts_the_events_anew(make_job: MakeJob, tmp_path: Path) -> None:
    train(make_job(tmp_path / "run", train__tensorboard=True))
    run = train(make_job(tmp_path / "run", train__tensorboard=True, train__epochs=2), overwrite=True)
    assert scalars(tmp_path / "run") == expected(run)


def test_training_goes_on_without_tensorboard(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: Callable[..., Any]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    ears = listener()
    run = train(make_job(tmp_path / "run", train__tensorboard=True, train__epochs=1), progress=ears)
    assert run.status == "finished"
    assert ["tensorboard is not installed" in text for text in ears.said] == [True]


def test_full_disk_under_tensorboard(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_shot: dict[str, Any], snapshot: Any
) -> None:
    """Events are for looking at: a disk that takes no more of them ends the run by name or not at all."""
    from torch.utils.tensorboard import FileWriter

    def full(self: object, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(FileWriter, "flush", full)  # what both flushing and closing a log go through
        try:
            train(make_job(tmp_path / "run", train__tensorboard=True))
        except StateError as error:
            assert "tensorboard" in str(error)
    train(make_job(tmp_path / "run"), resume=True)
    assert snapshot(tmp_path / "run")["records"] == small_shot["records"]


def test_rate_shown_is_the_rate_used(make_job: MakeJob, tmp_path: Path) -> None:
    class Ramp(Schedule):
        def rate(self, t: float) -> float:
            return t / 1000

    job = make_job(tmp_path / "run", train__tensorboard=True, train__epochs=2)
    run = train(replace(job, schedule=Ramp(lr=0, epochs=2)))
    assert [r.lr for r in run.records] == [1 / 1000, 2 / 1000]
    assert scalars(tmp_path / "run")["lr"] == expected(run)["lr"]
