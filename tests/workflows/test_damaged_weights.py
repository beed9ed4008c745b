"""Weights of a finished run that are damaged: resuming tells, and every message names those that are whole."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from command_cases import flatrock, refusal

import flatrock as library
from flatrock.core.errors import StateError

KEYS: dict[str, Any] = {"train__epochs": 2, "data__limit": 200, "select__size": 20, "evaluate__attacks": ["pgd-2"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with averaged weights. Copy it, do not change it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    swa = {"flatness": [{"name": "swa", "decay": 0.5}]}
    run = library.train("digits_standard", folder=folder, device="cpu", train__tensorboard=False, **KEYS, **swa)
    assert run.best is not None and run.best_average is not None
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def cut(folder: Path, *names: str) -> None:
    for name in names:
        file = folder / f"{name}.safetensors"
        file.write_bytes(file.read_bytes()[:300])


def resumed(folder: Path) -> Any:
    return flatrock("train", folder, "--resume", "--device", "cpu")


def words(done: Any) -> str:
    """What was printed, on one line."""
    return " ".join(done.output.split())


@pytest.mark.parametrize("states", [True, False], ids=["with states", "without"])
def test_resuming_tells_what_is_damaged_and_what_to_evaluate(run: Path, states: bool) -> None:
    for file in () if states else run.glob("state*"):
        file.unlink()
    assert "damaged" not in words(resumed(run))
    cut(run, "average-best")
    done = resumed(run)
    assert done.exit_code == 0, done.output
    told = words(done)
    assert f"{run}/average-best.safetensors is damaged and cannot be read" in told
    assert "use another checkpoint of the run, --which best or --which average-last or --which last" in told
    assert f"next: flatrock eval {run} --which best" in told
    assert flatrock("eval", run, "--which", "best", "--device", "cpu").exit_code == 0


def test_what_training_writes_again_is_not_told(run: Path) -> None:
    """The state has the last weights."""
    cut(run, "last", "average-last")
    told = words(resumed(run))
    assert "damaged" not in told and told.endswith(f"next: flatrock eval {run}")
    library.load(run, which="last")


def test_nothing_is_said_to_be_next_where_nothing_is_whole(run: Path) -> None:
    for file in run.glob("state*"):
        file.unlink()
    cut(run, "best", "last", "average-best", "average-last")
    told = words(resumed(run))
    assert "no other checkpoint of the run is whole: put the file back from a copy" in told
    assert "next:" not in told


def test_a_lost_file_is_told_too(run: Path) -> None:
    (run / "best.safetensors").unlink()
    told = words(resumed(run))
    assert f"{run}/best.safetensors is lost; use another checkpoint of the run, --which average-best or" in told
    assert told.endswith(f"next: flatrock eval {run}"), "which takes the average"


def test_what_may_be_deleted_is_not_missed(run: Path) -> None:
    for name in ("state", "state.older", "last", "average-last"):
        (run / f"{name}.safetensors").unlink()
    assert "lost" not in words(resumed(run))


def test_readers_name_the_others(run: Path) -> None:
    cut(run, "average-best", "average-last")
    with pytest.raises(StateError, match=r"average-best.safetensors is damaged .*--which best or --which last \(in Py"):
        library.load(run)
    assert "--which average-last" not in refusal(flatrock("eval", run, "--device", "cpu"))
    (run / "average-best.safetensors").unlink()
    with pytest.raises(StateError, match=r"is lost; use another checkpoint of the run, --which best or --which last"):
        library.load(run)


def test_python_is_told_by_a_warning(run: Path) -> None:
    cut(run, "best")
    with pytest.warns(UserWarning, match="best.safetensors is damaged") as caught:
        library.train(run, resume=True, device="cpu")
    assert caught[0].filename == __file__
    shutil.copy(run / "last.safetensors", run / "best.safetensors")
    with pytest.warns(UserWarning, match="holds a 'last' checkpoint where 'best' belongs"):
        library.train(run, resume=True, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library.load(run, which="average-best")
