"""Training on several devices as a user asks for it: processes begin, are watched over, fail and go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from team_cases import among_nets

import flatrock
from flatrock.core.errors import ConfigError, StateError, TrainingError
from flatrock.core.tensorfile import load
from flatrock.recipes import together
from flatrock.recipes.load import load_recipe

TWO = ["cpu", "cpu"]
TINY = {
    "model": {"name": "team_nets:mlp", "hidden": 8},
    "train": {"epochs": 2, "batch_size": 200, "tensorboard": False},
    "attack": {"steps": 1},
    "select": {"size": 20},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path) -> Iterator[None]:
    with among_nets(tmp_path):
        yield
    assert active_children() == []


class Listener:
    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.told.append(("begin", (task, total, done)))

    def advance(self, units: int, note: str = "") -> None:
        self.told.append(("advance", units))

    def end(self) -> None:
        self.told.append(("end", None))

    def say(self, text: str) -> None:
        self.told.append(("say", text))


def test_a_run_on_two_devices_is_a_run(tmp_path: Path) -> None:
    listener = Listener()
    run = flatrock.train("digits_at", **TINY, folder="runs/two", device=TWO, progress=listener)
    assert (run.status, len(run.records)) == ("finished", 2)
    assert listener.told[0] == ("begin", ("training digits_at", 12, 0))
    assert sum(units for kind, units in listener.told if kind == "advance") == 12
    assert listener.told[-1] == ("end", None)
    info = json.loads(Path("runs/two/run.json").read_text())
    assert info["provenance"]["processes"] == 2
    alone = flatrock.train("digits_at", **TINY, folder="runs/one", device="cpu")
    for ours, theirs in zip(run.records, alone.records, strict=True):
        assert ours.terms["total"] == pytest.approx(theirs.terms["total"], rel=1e-3)
        assert ours.running_accuracy == pytest.approx(theirs.running_accuracy, abs=0.005)
        assert (ours.clean, ours.robust) == pytest.approx((theirs.clean, theirs.robust), abs=0.051)
    with pytest.raises(StateError, match=r"run folder runs/two exists; continue it with --resume"):
        flatrock.train("digits_at", **TINY, folder="runs/two", device=TWO)


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """The process that watches is killed, all others end with it, and resuming leads to the same weights."""
    whole = flatrock.train("digits_at", **TINY, folder="whole", device=TWO)
    script = tmp_path / "long.py"
    script.write_text(
        f"import flatrock\nif __name__ == '__main__':\n"
        f"    flatrock.train('digits_at', **{TINY!r}, folder='killed', device={TWO!r})\n"
    )
    killed = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "SECONDS_A_PASS": "0.1"})
    metrics, deadline = Path("killed/metrics.jsonl"), time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") == 1):
        assert time.monotonic() < deadline and killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    while Path("killed/.lock").exists() and _held(Path("killed/.lock")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert json.loads(Path("killed/run.json").read_text())["status"] == "running"
    shutil.copytree("killed", "elsewhere")
    assert flatrock.train("digits_at", **TINY, folder="elsewhere", device="cpu", resume=True).status == "finished"
    run = flatrock.train("digits_at", **TINY, folder="killed", device=TWO, resume=True)
    assert run.status == "finished"
    (ours, _), (theirs, _) = load(whole.folder / "last.safetensors"), load(run.folder / "last.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _held(lock: Path) -> bool:
    """Whether a process still trains into the folder."""
    import fcntl

    with lock.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


FAILING = {
    "Raising": (TrainingError, r"on cpu: ValueError: no such luck \(where: r/failure\.txt\)\. No epoch was", "failed"),
    "Dying": (StateError, r"the process on cpu has ended \(exit code 3\)\. The run goes on .*--resume", "running"),
    "Gathering": (TrainingError, r"seen is not the same on all devices \(1 such", "failed"),
    "Choosy": (TrainingError, r"has a gradient on some devices only \(2 such\); train on one device", "failed"),
}


@pytest.mark.parametrize("network", FAILING)
def test_a_process_that_fails_ends_the_others(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "LAST_WORDS", 3.0)
    error, message, status = FAILING[network]
    begun = time.monotonic()
    with pytest.raises(error, match=message):
        flatrock.train("digits_at", **{**TINY, "model": {"name": f"team_nets:{network}"}}, folder="r", device=TWO)
    assert time.monotonic() - begun < 60
    assert json.loads(Path("r/run.json").read_text())["status"] == status
    assert Path("r/failure.txt").exists() == (network == "Raising")
    assert network != "Raising" or "in forward" in Path("r/failure.txt").read_text()


def test_an_error_of_all_is_told_by_the_first(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"non-finite at step \d+: term .* \(its samples: failed_batch in r/run.json"
    ):
        flatrock.train("digits_at", **TINY, optimizer={"lr": 1e30}, folder="r", device=TWO)
    assert json.loads(Path("r/run.json").read_text())["status"] == "failed"


def test_what_cannot_be_shared_is_refused_at_once() -> None:
    mixed = {**TINY, "data": {"augment": {"mixup": 1.0}}, "train": {"epochs": 1, "batch_size": 3}}
    with pytest.raises(ConfigError) as refused:
        flatrock.train("digits_at", **mixed, device=TWO)
    assert len(refused.value.faults) == 2
    assert "mixup: samples are mixed with others of the whole batch; train on one device" in str(refused.value)
    assert "train.batch_size: 3 leaves a device less than two samples of a kind" in str(refused.value)
    with pytest.raises(ConfigError, match="no device is named"):
        flatrock.train("digits_at", **TINY, device=[])
    twice = [torch.device("cuda"), torch.device("cuda:0")]
    with pytest.raises(ConfigError, match="got cuda:0, cuda:0; name each GPU once"):
        together.train_together(load_recipe("digits_at", []), twice)
    kinds = [torch.device("cpu"), torch.device("cuda:0")]
    with pytest.raises(ConfigError, match="got cpu, cuda:0; name devices of one kind"):
        together.train_together(load_recipe("digits_at", []), kinds)


@pytest.mark.gpu
def test_two_processes_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "SHARED_GPU", True)
    device = ["cuda:0", "cuda:0"]
    run = flatrock.train("digits_trades_awp_rat_swa", train={"epochs": 2}, folder="runs/two", device=device)
    alone = flatrock.train("digits_trades_awp_rat_swa", train={"epochs": 2}, folder="runs/one", device="cuda:0")
    assert run.status == alone.status == "finished"
    for ours, theirs in zip(run.records, alone.records, strict=True):
        assert ours.terms["total"] == pytest.approx(theirs.terms["total"], rel=0.1)
