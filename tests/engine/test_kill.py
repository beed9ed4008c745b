"""kill -9 at any moment, in real processes: the resumed run ends in the bits of the undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flatrock.engine.folder import RunFolder

Shot = Callable[[Path], dict[str, Any]]
KILLED, DONE, REFUSED = -signal.SIGKILL, 0, 3
# Random moments: 4 epochs and a state after every step. Moments of writing: 2 epochs and a state after each.
LONG = {"train.save_seconds": 1e-9}
SHORT = {"train.epochs": 2, "train.batch_size": 48}
ADAMW = {**LONG, "optimizer": {"name": "adamw", "lr": 0.01}}


class Trainer:
    """Orders to the worker process."""

    def __init__(self, folder: Path) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        worker = Path(__file__).with_name("worker.py")
        self.process = subprocess.Popen(
            [sys.executable, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.answer, self.counter = folder / "answer", folder / "counter"

    def train(
        self, folder: Path, overrides: dict[str, Any], *, resume: bool, overwrite: bool = False, **death: Any
    ) -> int:
        """Train in a new process; its exit code, or minus the signal that ended it."""
        order = {"folder": str(folder), "overrides": overrides, "resume": resume, "overwrite": overwrite, **death}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order |= {"answer": str(self.answer), "counter": str(self.counter)}
        self.answer.write_text("")
        self.counter.unlink(missing_ok=True)
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def said(self) -> str:
        """The error that ended the last process, if one did."""
        return self.answer.read_text()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    made = Trainer(tmp_path_factory.mktemp("worker"))
    yield made
    assert made.process.stdin is not None
    made.process.stdin.close()
    made.process.wait(timeout=30)


@pytest.fixture(scope="module")
def whole(
    trainer: Trainer, tmp_path_factory: pytest.TempPathFactory, snapshot: Shot
) -> Callable[[dict[str, Any]], Any]:
    """The snapshot of an undisturbed run in a process of its own."""
    known: dict[int, Any] = {}

    def get(overrides: dict[str, Any]) -> Any:
        if id(overrides) not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            assert trainer.train(folder, overrides, resume=False) == DONE, trainer.said()
            known[id(overrides)] = snapshot(folder)
        return known[id(overrides)]

    return get


@pytest.mark.parametrize(("seed", "how"), [(0, LONG), (1, LONG), (2, ADAMW)], ids=["0", "1", "adamw"])
def test_killed_at_random_moments(
    trainer: Trainer, whole: Callable[..., Any], tmp_path: Path, snapshot: Shot, seed: int, how: dict[str, Any]
) -> None:
    """Three processes, each killed a random while after a random step; each begins where the last was saved."""
    undisturbed = whole(how)
    rng = random.Random(f"kill {seed}")
    for life, steps in enumerate(sorted(rng.sample(range(11), 3))):
        moment = {"steps": steps, "seconds": rng.uniform(0, 0.02)}
        assert trainer.train(tmp_path / "run", how, resume=life > 0, kill_after=moment) == KILLED, trainer.said()
    assert trainer.train(tmp_path / "run", how, resume=True) == DONE, trainer.said()
    assert snapshot(tmp_path / "run") == undisturbed
    assert RunFolder(tmp_path / "run").run().status == "finished"


@pytest.mark.parametrize(("moment", "stride"), [("before", 1), ("after", 4)])
def test_killed_at_every_rename(
    trainer: Trainer, whole: Callable[..., Any], tmp_path: Path, snapshot: Shot, moment: str, stride: int
) -> None:
    """The n-th file is about to be renamed into place, for every n there is; or just was, for some."""
    undisturbed = whole(SHORT)
    dead_ends = []
    for number in range(1, 100, stride):
        folder = tmp_path / f"run-{number}"
        code = trainer.train(folder, SHORT, resume=False, die_at=number, moment=moment)
        if code == DONE:
            break
        assert code == KILLED, trainer.said()
        code = trainer.train(folder, SHORT, resume=True)
        if code == REFUSED:
            # Nothing was saved yet. That must be said, with a cure, and the cure must work.
            assert not (folder / "state.safetensors").exists()
            assert "start again with --overwrite" in trainer.said(), number
            code = trainer.train(folder, SHORT, resume=False, overwrite=True)
        if code == REFUSED:
            dead_ends.append((number, trainer.said()))
            continue
        assert snapshot(folder) == undisturbed, f"killed {moment} rename {number}"
        assert RunFolder(folder).run().status == "finished"
    assert 12 <= number < 99, "a run renames that often"
    assert not dead_ends, "neither --resume nor --overwrite gets on"
