"""A run that was stopped and resumed ends in the same bits as one that was not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatrock.core.errors import StateError
from flatrock.core.tensorfile import load, save
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job
from flatrock.engine.loop import train

MakeJob = Callable[..., Job]
Shot = Callable[[Path], dict[str, Any]]
Stopper = Callable[[int], Any]

OFTEN, SELDOM = 1e-9, 1e9  # a state after every step, or at the end of epochs only


def stop_at(job: Job, listener: Any, *, resume: bool) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(job, resume=resume, progress=listener)


@pytest.mark.parametrize("save_seconds", [OFTEN, SELDOM], ids=["often", "seldom"])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_stops(
    make_job: MakeJob,
    tmp_path: Path,
    stopper: Stopper,
    snapshot: Shot,
    small_shot: dict[str, Any],
    save_seconds: float,
    seed: int,
) -> None:
    """Three stops at random steps, some of them inside epochs, some in the first; then on to the end."""
    stops = sorted(random.Random(f"{seed}").sample(range(1, 13), 3))
    folder = tmp_path / "run"
    for i, step in enumerate(stops):
        stop_at(make_job(folder, train__save_seconds=save_seconds), stopper(step), resume=i > 0)
        state = load(folder / "state.safetensors")[1]
        saved = 3 * state["epoch"] + state["step_in_epoch"]
        # The listener stops before the state of its own step is stored.
        assert saved == (step - 1 if save_seconds == OFTEN else 3 * ((step - 1) // 3)), f"stops {stops}"
        assert RunFolder(folder).read_info()["status"] == "interrupted"
    run = train(make_job(folder, train__save_seconds=save_seconds), resume=True)
    assert run.status == "finished"
    assert snapshot(folder) == small_shot, f"stops {stops}"


@pytest.mark.parametrize("options", [{"objective": {"name": "trades"}, "attack__bn_mode": "train"}, {"seed": 1}])
def test_stop_at_every_step(
    make_job: MakeJob,
    tmp_path: Path,
    stopper: Stopper,
    snapshot: Shot,
    options: dict[str, Any],
) -> None:
    """As many stops as steps: momentum, BatchNorm, running means and the loader all come back."""
    options = {**options, "train__epochs": 2, "optimizer__nesterov": True, "data__augment": {"crop": 1, "flip": True}}
    options |= {"select__metric": "clean", "optimizer__decay_on": "weights"}

    def job(name: str) -> Job:
        return make_job(tmp_path / name, train__save_seconds=OFTEN, **options)

    train(job("whole"))
    for step in range(2, 7):
        stop_at(job("stopped"), stopper(step), resume=step > 2)
    train(job("stopped"), resume=True)
    assert snapshot(tmp_path / "stopped") == snapshot(tmp_path / "whole")


@pytest.mark.parametrize("epoch", [1, 3, 4])
def test_stop_between_the_last_step_and_the_record(
    make_job: MakeJob, tmp_path: Path, snapshot: Shot, small_shot: dict[str, Any], epoch: int
) -> None:
    """The state holds a whole epoch of steps but no record of it: the record must come out the same, rate included."""
    calls = 0

    def stopping(job: Job) -> Job:
        def probe(model: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == epoch:
                raise KeyboardInterrupt
            return job.probe(model)

        return replace(job, probe=probe)

    stop_at(stopping(make_job(tmp_path / "run", train__save_seconds=OFTEN)), None, resume=False)
    assert load(tmp_path / "run" / "state.safetensors")[1]["step_in_epoch"] == 3
    train(make_job(tmp_path / "run", train__save_seconds=OFTEN), resume=True)
    assert snapshot(tmp_path / "run") == small_shot


def test_stop_before_the_first_step_and_after_the_last(
    make_job: MakeJob, tmp_path: Path, snapshot: Shot, small_shot: dict[str, Any], listener: Callable[..., Any]
) -> None:
    class Early(listener().__class__):  # type: ignore[misc]
        def begin(self, task: str, total: int, done: int = 0) -> None:
            raise KeyboardInterrupt

    stop_at(make_job(tmp_path / "run"), Early(), resume=False)
    train(make_job(tmp_path / "run"), resume=True)
    assert snapshot(tmp_path / "run") == small_shot
    ears = listener()
    again = train(make_job(tmp_path / "run"), resume=True, progress=ears)
    assert (ears.steps, again.status) == (12, "finished"), "there was nothing left to do"
    assert snapshot(tmp_path / "run") == small_shot


def test_the_clock_goes_on_where_it_stood(make_job: MakeJob, tmp_path: Path, stopper: Stopper) -> None:
    folder = tmp_path / "run"
    stop_at(make_job(folder), stopper(5), resume=False)
    tensors, meta = load(folder / "state.safetensors")
    assert 0 < meta["elapsed"] < 100
    save(folder / "state.safetensors", tensors, meta | {"elapsed": 1000.0})
    first, *later = (r.elapsed for r in train(make_job(folder), resume=True).records)
    assert first < 100
    assert all(1000 < elapsed < 1100 for elapsed in later)


def test_a_run_from_before_the_clock_stays_without(make_job: MakeJob, tmp_path: Path, stopper: Stopper) -> None:
    folder = tmp_path / "run"
    stop_at(make_job(folder), stopper(5), resume=False)
    tensors, meta = load(folder / "state.safetensors")
    del meta["elapsed"], meta["history"][0]["elapsed"]
    save(folder / "state.safetensors", tensors, meta)
    assert [r.elapsed for r in train(make_job(folder), resume=True).records] == [None] * 4


def test_resume_of_nothing_is_a_fresh_run(
    make_job: MakeJob, tmp_path: Path, snapshot: Shot, small_shot: dict[str, Any]
) -> None:
    (tmp_path / "run").mkdir()
    train(make_job(tmp_path / "run"), resume=True)
    assert snapshot(tmp_path / "run") == small_shot


def test_free_keys_may_change(
    make_job: MakeJob, tmp_path: Path, stopper: Stopper, snapshot: Shot, small_shot: dict[str, Any]
) -> None:
    """How often to save, what to show and what to evaluate later do not decide the weights."""
    stop_at(make_job(tmp_path / "run"), stopper(5), resume=False)
    changed = {"train__save_seconds": OFTEN, "train__tensorboard": True, "evaluate__attacks": ["fgsm"], "name": "me"}
    train(make_job(tmp_path / "run", **changed), resume=True)
    assert snapshot(tmp_path / "run")["records"] == small_shot["records"]
    assert snapshot(tmp_path / "run")["last.safetensors"][0] == small_shot["last.safetensors"][0]


@pytest.mark.parametrize("save_seconds", [OFTEN, SELDOM], ids=["often", "seldom"])
def test_a_run_cut_short_is_cut_at_the_same_step(
    make_job: MakeJob, tmp_path: Path, stopper: Stopper, snapshot: Shot, save_seconds: float
) -> None:
    def job(name: str) -> Job:
        return make_job(tmp_path / name, train__max_steps=7, train__save_seconds=save_seconds)

    train(job("whole"))
    stop_at(job("stopped"), stopper(5), resume=False)
    stop_at(job("stopped"), stopper(7), resume=True)
    run = train(job("stopped"), resume=True)
    assert (run.status, run.last.step) == ("truncated", 7)
    assert snapshot(tmp_path / "stopped") == snapshot(tmp_path / "whole")


def test_resume_says_where_it_starts(
    make_job: MakeJob, tmp_path: Path, stopper: Stopper, listener: Callable[..., Any]
) -> None:
    stop_at(make_job(tmp_path / "run"), stopper(8), resume=False)
    steps: list[int] = []
    train(make_job(tmp_path / "run"), resume=True, progress=listener(steps.append))
    assert steps == list(range(7, 13)), "two epochs were stored, the eighth step is run again"


def test_falls_back_on_the_older_state(
    make_job: MakeJob,
    tmp_path: Path,
    stopper: Stopper,
    snapshot: Shot,
    small_shot: dict[str, Any],
    listener: Callable[..., Any],
) -> None:
    folder = RunFolder(tmp_path / "run")
    stop_at(make_job(folder.path), stopper(8), resume=False)
    folder.state.write_bytes(folder.state.read_bytes()[:-7])
    ears = listener()
    train(make_job(folder.path), resume=True, progress=ears)
    assert snapshot(folder.path) == small_shot
    (said,) = ears.said
    assert "state.safetensors is damaged" in said
    assert "resuming from the older state" in said


def test_a_damaged_state_does_not_push_out_the_good_one(
    make_job: MakeJob,
    tmp_path: Path,
    stopper: Stopper,
    snapshot: Shot,
    small_shot: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """state is damaged, older is good; a stop while the next state is written must leave one good state."""
    folder = RunFolder(tmp_path / "run")
    stop_at(make_job(folder.path), stopper(8), resume=False)
    folder.state.write_bytes(b"junk")
    rename = Path.replace

    def stop(self: Path, target: Path) -> Path:
        if self.name.endswith(".part") and Path(target).name == "state.safetensors":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        stop_at(make_job(folder.path), None, resume=True)
    train(make_job(folder.path), resume=True)
    assert snapshot(folder.path) == small_shot


def test_two_damaged_states_end_the_run(make_job: MakeJob, tmp_path: Path, stopper: Stopper) -> None:
    folder = RunFolder(tmp_path / "run")
    stop_at(make_job(folder.path), stopper(8), resume=False)
    for file in (folder.state, folder.older_state):
        file.write_bytes(b"junk")
    with pytest.raises(StateError, match=r"(?s)cannot be resumed:.*state\.safetensors.*state\.older.*--overwrite"):
        train(make_job(folder.path), resume=True)
