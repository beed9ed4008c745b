"""`flatrock certify --device cpu,cpu`, driven as a user drives it: killed, its workers killed, Ctrl-C, and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_cases import flatrock, read_again, refusal, stored

VOTES = ("--sigma", "0.25", "--n0", "20", "--n", "6000", "--limit", "10")
SOME = ("--sigma", "0.25", "--n0", "20", "--n", "100", "--limit", "6")


def content(file: Path) -> dict[str, Any]:
    """What a certificate says, without what tells when, how fast and by how many it was made."""
    told: dict[str, Any] = json.loads(file.read_text())
    told.pop("seconds")
    for name in ("time", "devices"):
        told["provenance"].pop(name, None)
    return told


@pytest.fixture(scope="module")
def whole(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds."""
    copy = shutil.copytree(run_folder, tmp_path_factory.mktemp("whole") / run_folder.name)
    return content(stored(flatrock("certify", copy, *VOTES, "--device", "cpu")))


def workers(parent: int) -> list[int]:
    """The processes that a process has begun to work with."""
    told = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,command="], capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=2) for line in told.stdout.splitlines()]
    return [int(pid) for pid, ppid, command in lines if int(ppid) == parent and "spawn_main" in command]


def gone(pid: int) -> bool:
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return told.stdout.strip()[:1] in ("", "Z")


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


@pytest.mark.parametrize("how", ["all are killed", "one worker is killed", "ctrl-c"])
def test_however_it_ends_it_goes_on_and_ends_the_same(
    whole: dict[str, Any], run_folder: Path, tmp_path: Path, how: str
) -> None:
    run = shutil.copytree(run_folder, tmp_path / run_folder.name)
    words = ["certify", str(run), *VOTES]
    process = subprocess.Popen(
        [sys.executable, "-m", "flatrock", *words, "--device", "cpu,cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    part = run / "certificate-best-sigma0.25-n20+6000-alpha0.001-samples10-seed0.part"
    deadline = time.monotonic() + 100
    while len(lines(part)) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    begun = workers(process.pid)
    assert len(begun) == 2
    if how == "ctrl-c":
        os.killpg(process.pid, signal.SIGINT)  # a terminal tells everybody
    else:
        os.kill(process.pid if how == "all are killed" else begun[1], signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    while not all(map(gone, begun)):
        assert time.monotonic() < deadline, "a worker is left behind"
        time.sleep(0.05)
    assert "Traceback" not in said
    if how == "all are killed":
        assert process.returncode == -signal.SIGKILL
    elif how == "ctrl-c":
        assert process.returncode == 130
        assert "interrupted; the same command with --resume goes on from the last finished sample" in said
    else:
        assert process.returncode == 2
        assert "the process on cpu has ended (exit code -9, for want of memory?). What is finished is kept" in said
        assert "go on with --resume" in said
    kept = [json.loads(line) for line in lines(part)]
    assert 2 <= len(kept) - 1 < 10
    assert not part.with_suffix(".json").exists()
    again = flatrock(*words, "--resume", "--device", "cpu,cpu" if how == "all are killed" else "cpu")
    assert content(stored(again)) == whole
    found = json.loads(stored(again).read_text())
    assert {row["seconds"] for row in kept[1:]} <= set(found["seconds"]), "what was on disk was not computed again"
    assert not part.exists()


@pytest.mark.usefixtures("here")
def test_a_model_of_ones_own(here: Path) -> None:
    net = ("certify", "--model", "foreign_module:Shifted", "--data", "digits", *SOME)
    one, two = (stored(flatrock(*net, "--device", device, "--out", f"{device}.json")) for device in ("cpu", "cpu,cpu"))
    ours, theirs = json.loads(one.read_text()), json.loads(two.read_text())
    assert (ours["counts"], ours["radii"], ours["top"]) == (theirs["counts"], theirs["radii"], theirs["top"])
    assert theirs["provenance"]["devices"] == ["cpu", "cpu"]
    assert "devices" not in ours["provenance"]
    before = one.read_text()
    done = flatrock(*net, "--device", "cpu,cpu", "--out", one, "--resume")
    assert read_again(done).read_text() == before, "a finished one is read, by however many it was made"


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("cpu,gpu7", "unknown device 'gpu7'; use auto, cpu, cuda or cuda:0"),
        ("cpu,", "unknown device ''"),
        ("cuda:98,cuda:99", "device 'cuda:98' asked for, but torch sees"),
    ],
)
def test_devices_that_do_not_exist_are_refused_before_any_work(run_folder: Path, device: str, told: str) -> None:
    assert told in refusal(flatrock("certify", run_folder, *SOME, "--device", device))
    assert not list(run_folder.glob("*.part"))
