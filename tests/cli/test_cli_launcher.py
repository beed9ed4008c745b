"""Who may begin `flatrock` and on which devices: torchrun's several processes are refused, so are lists for some."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_cases import flatrock, refusal

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
NO_RANK = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
OTHER_LAUNCHER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}
TOLD = "each of which would do all of the work; begin flatrock once, without torchrun: with --device all it begins"


@pytest.fixture(autouse=True)
def nobody_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def launched(monkeypatch: pytest.MonkeyPatch, told: dict[str, str]) -> None:
    for name, value in told.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("told", "who"), [(TORCHRUN, "process 1 of 2"), (NO_RANK, "process ? of 2"), (OTHER_LAUNCHER, "process 0 of 8")]
)
def test_one_of_several_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: dict[str, str], who: str
) -> None:
    launched(monkeypatch, told)
    said = refusal(flatrock("train", "digits_at", "--run-dir", tmp_path / "r", "--device", "cpu"))
    assert f"torchrun began this as {who} (RANK, WORLD_SIZE), {TOLD}" in said
    assert not (tmp_path / "r").exists()
    assert TOLD in refusal(flatrock("ls"))


@pytest.mark.parametrize(
    "told",
    [
        {},
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
        {**TORCHRUN, "WORLD_SIZE": ""},
        {**TORCHRUN, "WORLD_SIZE": "many"},
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "4", "RANK": "0"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GPUS_ON_NODE": "4"},
    ],
    ids=str,
)
def test_who_is_alone_may_begin(monkeypatch: pytest.MonkeyPatch, told: dict[str, str]) -> None:
    launched(monkeypatch, told)
    assert flatrock("ls").exit_code == 0


def torchrun(processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The real one; its processes say which flatrock they are through this process's path."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.run([*run, "-m", "flatrock", *words], capture_output=True, text=True, timeout=200)


def test_torchrun_with_two_processes_makes_no_run(tmp_path: Path) -> None:
    done = torchrun(2, "train", "digits_at", "train.epochs=1", "--run-dir", str(tmp_path / "r"), "--device", "cpu")
    assert done.returncode != 0
    assert TOLD in done.stderr
    assert "exitcode  : 2 " in done.stderr
    assert not (tmp_path / "r").exists()


def test_torchrun_with_one_process_trains_and_our_own_processes_are_not_refused(
    tmp_path: Path, tiny: tuple[str, ...]
) -> None:
    folder = tmp_path / "r"
    done = torchrun(1, "train", "digits_at", *tiny, "--run-dir", str(folder), "--device", "cpu,cpu")
    assert done.returncode == 0, done.stderr
    assert (folder / "best.safetensors").is_file()


@pytest.mark.parametrize("device", ["all", "cpu,cpu"])
@pytest.mark.parametrize(
    "words",
    [
        ("curvature",),
        ("overfit",),
        ("pseudo-label", "--images", "x.npz", "--out", "y.npz"),
    ],
    ids=lambda words: words[0],
)
def test_commands_that_do_not_share_work_say_so(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], device: str
) -> None:
    monkeypatch.chdir(tmp_path)
    told = (
        f"device '{device}' names several, and this command works on one; name it, such as cuda:0 "
        "(train, eval, certify, landscape and reproduce take several)"
    )
    assert told in refusal(flatrock(words[0], run_folder, *words[1:], "--device", device))
    assert told in refusal(flatrock("bench", "digits_at", "--device", device))
    assert list(tmp_path.iterdir()) == []
