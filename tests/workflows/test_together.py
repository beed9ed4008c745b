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
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_cases import Waits
from team_cases import among_nets, in_one, in_processes

import flatrock
from flatrock.core.errors import ConfigError, StateError, TrainingError
from flatrock.core.team import Team
from flatrock.core.tensorfile import load
from flatrock.engine.step import train_step
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.workflows import together

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


def test_the_caller_hears_of_epochs_and_what_it_raises_ends_all() -> None:
    """It is called here, where a closure has what it needs, and an error of it ends every process."""
    heard = []

    def hear(record: flatrock.core.runs.EpochRecord) -> None:
        assert len(Path("r/metrics.jsonl").read_text().splitlines()) >= record.epoch, "it is stored already"
        heard.append(record)
        if len(heard) == 1:
            raise ZeroDivisionError("enough")

    with pytest.raises(ZeroDivisionError, match="enough"):
        flatrock.train("digits_at", **TINY, folder="r", device=TWO, on_epoch=hear)
    info = json.loads(Path("r/run.json").read_text())
    assert (info["status"], info["reason"]) == ("interrupted", "ZeroDivisionError: enough")
    run = flatrock.train("r", device=TWO, resume=True, on_epoch=hear)
    assert run.status == "finished"
    assert [record.epoch for record in heard] == [1, 2]


def test_sigterm_ends_all(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text(
        f"import flatrock\nif __name__ == '__main__':\n"
        f"    flatrock.train('digits_at', **{TINY!r}, folder='asked', device={TWO!r})\n"
    )
    asked = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "SECONDS_A_PASS": "0.1"})
    metrics, deadline = Path("asked/metrics.jsonl"), time.monotonic() + 60
    while not metrics.exists():
        assert time.monotonic() < deadline and asked.poll() is None
        time.sleep(0.02)
    asked.send_signal(signal.SIGTERM)
    assert asked.wait(timeout=60) == 143
    info = json.loads(Path("asked/run.json").read_text())
    assert (info["status"], info["reason"]) == ("interrupted", "SIGTERM")
    assert not _held(Path("asked/.lock"))
    assert flatrock.train("asked", device=TWO, resume=True).status == "finished"


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
    "Raising": (
        TrainingError,
        r"on cpu: ValueError: no such luck \(team_nets\.py:\d+\) \(where: r/failure\.txt\)\. No epoch was",
        "failed",
    ),
    "Dying": (StateError, r"the process on cpu has ended \(exit code 3\)\. The run goes on .*--resume", "interrupted"),
    "Gathering": (TrainingError, r"seen is not the same on all devices \(1 such", "failed"),
    "Choosy": (TrainingError, r"is trained \(requires_grad\) on some devices only \(2 such parameters\); t", "failed"),
    "Thawing": (TrainingError, r"is trained \(requires_grad\) in the middle of an epoch and was not at its", "failed"),
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


ROUTED = ("model.name=team_nets:Routed", "train.batch_size=33", "seed=4", "optimizer.weight_decay=0.05")
ROUTES = {
    "standard": ["digits_standard", *ROUTED],
    "at_awp": ["digits_at_awp", *ROUTED, "attack.steps=2", "threat={norm: l2, eps: 0.1}"],
}


def test_layers_that_some_batches_skip(tmp_path: Path) -> None:
    """As one process trains them: what no sample of a step needs is neither decayed nor moved on by its momentum."""
    loader = build_job(load_recipe(ROUTES["standard"][0], ROUTES["standard"][1:])).loader
    parts = [list(islice(loader.epoch(0, 0, Team(rank, 2)), 4)) for rank in (0, 1)]
    used = [[bool((batch.x.flatten(1).mean(1) > 0.37).any()) for batch in part] for part in parts]
    assert used == [[False, True, False, False], [False, False, True, False]]
    for name in ("two", "one"):
        (tmp_path / name).mkdir()
    leader, other = in_processes(2, ROUTES, tmp_path / "two")
    alone = in_one(ROUTES, tmp_path / "one")
    for case in ROUTES:
        assert all(torch.equal(leader[case][key], other[case][key]) for key in leader[case])
        for key, tensor in alone[case].items():
            assert torch.allclose(leader[case][key], tensor, rtol=1e-5, atol=1e-6), (case, key)


def test_only_who_misses_a_gradient_reads_what_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading waits for a GPU, and every step of an ordinary network would."""
    monkeypatch.setattr(
        "flatrock.core.team.dist.all_reduce", lambda flat: flat.add_(torch.tensor([0.5, 0.0, 0.5, 0.0]))
    )
    like = {"a": torch.zeros(1), "b": torch.zeros(1)}
    found = Team(0, 2).mean_found({"a": None, "b": None}, like, 0.5)
    assert found == {"a": torch.tensor([0.5])}, "the other one has a, and nobody b"
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    whole = Team(0, 2).mean_found({"a": torch.ones(1), "b": torch.ones(1)}, like, 0.5)
    assert whole == {"a": torch.tensor([1.0]), "b": torch.tensor([0.5])}


@pytest.mark.parametrize("recipe", ["digits_standard", "digits_trades_awp_rat_swa"])
def test_no_step_waits_for_a_gpu(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, where no number can be read; noise only a CPU and a GPU have."""
    asked: list[Any] = []
    monkeypatch.setattr("flatrock.core.team.dist.all_reduce", lambda flat: asked.append(flat.numel()))
    monkeypatch.setattr(Team, "_same", lambda team, names: names)
    quiet = ["flatness=[awp, {name: rat, sigma: 0}]"] if "rat" in recipe else []
    job = build_job(load_recipe(recipe, quiet), folder=tmp_path / "run", device="meta", team=Team(0, 2))
    job.model.train()
    batches = iter(job.loader.epoch(0, 0, job.team))
    next(batches)  # the order of an epoch is drawn on the CPU
    with Waits() as waits:
        train_step(job, next(batches), step=1, guard=False)
    assert waits.found == []
    assert max(asked) > sum(p.numel() for p in job.model.parameters()), "gradients are sent"


def test_an_error_of_all_is_told_by_the_first(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"non-finite at step \d+: term .* \(its samples: failed_batch in r/run.json"
    ):
        flatrock.train("digits_at", **TINY, optimizer={"lr": 1e30}, folder="r", device=TWO)
    assert json.loads(Path("r/run.json").read_text())["status"] == "failed"


def test_nothing_to_resume_is_told_once_by_the_caller(capfd: pytest.CaptureFixture[str]) -> None:
    short = {**TINY, "train": {"epochs": 1, "batch_size": 200, "max_steps": 1, "tensorboard": False}}
    with pytest.warns(UserWarning, match="there is nothing to resume in new; a new run begins") as told:
        flatrock.train("digits_at", **short, folder="new", device=TWO, resume=True)
    assert [warning.filename for warning in told] == [__file__]
    assert "resume" not in capfd.readouterr().err, "no other process tells it"
    listener = Listener()
    flatrock.train("digits_at", **short, folder="newer", device=TWO, resume=True, progress=listener)
    assert [text for kind, text in listener.told if kind == "say"] == [
        "there is nothing to resume in newer; a new run begins"
    ]


def test_processes_end_at_once_and_lose_no_word(capfd: pytest.CaptureFixture[str]) -> None:
    """A thread of the process group that lets go of a tensor while Python is taken apart aborts."""
    talking = {**TINY, "model": {"name": "team_nets:Talking"}, "train": {"epochs": 1, "batch_size": 200}}
    assert flatrock.train("digits_at", **talking, folder="r", device=TWO).status == "finished"
    out = capfd.readouterr().out
    assert "made" in out and "taken apart" not in out


@pytest.mark.parametrize("mixing", ["mixup", "cutmix"])
def test_what_cannot_be_shared_is_refused_at_once(mixing: str) -> None:
    mixed = {**TINY, "data": {"augment": {mixing: 1.0}}, "train": {"epochs": 1, "batch_size": 3}}
    with pytest.raises(ConfigError) as refused:
        flatrock.train("digits_at", **mixed, device=TWO)
    assert len(refused.value.faults) == 2
    assert f"{mixing}: samples are mixed with others of the whole batch; train on one device" in str(refused.value)
    assert "train.batch_size: 3 leaves one of 2 devices less than two samples of a kind" in str(refused.value)
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
