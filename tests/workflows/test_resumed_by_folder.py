"""A run goes on by its folder alone: its recipe, overrides and place are those it began with."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from interrupted import Ends
from typer.testing import CliRunner

import flatrock
from flatrock.cli.main import app
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.tensorfile import load
from flatrock.engine.folder import RunFolder

# Unlike the recipe's own in many ways, which nobody has to say again.
KEYS: dict[str, Any] = {"train__epochs": 2, "data__limit": 200, "attack__steps": 1, "select__size": 20, "seed": 5}


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was interrupted in its second epoch, told by a path as people write it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        flatrock.train("digits_standard", folder="runs/mine", progress=Ends(7, KeyboardInterrupt), **KEYS)
    return Path("runs/mine")


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", *words])
    return result.exit_code, result.output


def weights(folder: Path) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in load(folder / "last.safetensors")[0].items()}


def test_sigterm_ends_the_command_as_ctrl_c_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"{key.replace('__', '.')}={value}" for key, value in KEYS.items()]
    begin = [sys.executable, "-m", "flatrock", "train", "digits_standard", *words, "train.epochs=100000"]
    process = subprocess.Popen([*begin, "--device", "cpu"], stderr=subprocess.PIPE, text=True)
    folder, deadline = RunFolder(Path("runs/digits_standard")), time.monotonic() + 60
    while not (folder.metrics.exists() and folder.metrics.stat().st_size):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    assert folder.unfinished() == "a process is training it now"
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "interrupted by SIGTERM; the same command with --resume continues from the last saved state" in said
    assert folder.unfinished() == "interrupted: SIGTERM"
    assert folder.run().records
    folder.check_resumable()


def test_the_command_goes_on_to_the_same_bits(stopped: Path) -> None:
    code, said = call("runs/mine", "--resume")
    assert code == 0, said
    assert "next: flatrock eval runs/mine" in said
    whole = flatrock.train("digits_standard", folder="runs/whole", **KEYS)
    assert weights(stopped) == weights(whole.folder)
    assert RunFolder(stopped).recipe.read_bytes() == RunFolder(whole.folder).recipe.read_bytes()


@pytest.mark.parametrize("kind", [str, Path, lambda place: RunFolder(Path(place)).run()], ids=["text", "path", "run"])
def test_python_goes_on_too(stopped: Path, kind: Any) -> None:
    run = flatrock.train(kind("runs/mine"), resume=True)
    assert (run.folder, run.status, len(run.records)) == (stopped, "finished", 2)


def test_overrides_are_those_that_a_resumed_run_takes(stopped: Path) -> None:
    with pytest.raises(StateError, match=r"differences:\n  train.epochs: 2 there, 3 asked for\nname the run alone"):
        flatrock.train("runs/mine", resume=True, train__epochs=3)
    flatrock.train("runs/mine", resume=True, evaluate={"attacks": ["fgsm"]})
    assert "- fgsm\n" in RunFolder(stopped).recipe.read_text()


def test_without_resume_both_ways_are_told(stopped: Path) -> None:
    for tried in (lambda: flatrock.train("runs/mine"), lambda: flatrock.train("runs/mine", overwrite=True)):
        with pytest.raises(ConfigError, match=r"`flatrock train runs/mine --resume` .*runs/mine/recipe\.yaml"):
            tried()
    assert RunFolder(stopped).run().records, "left alone"


def test_it_stays_where_it_is(stopped: Path) -> None:
    code, said = call("runs/mine", "--resume", "--run-dir", "runs/other")
    assert code == 2
    assert "run runs/mine goes on where it is, but the run folder asked for is runs/other" in said
    code, said = call("runs/mine", "--resume", "--seeds", "0,1")
    assert code == 2
    assert "runs/mine is one run, but --seeds begins one for each seed" in said
    assert not Path("runs/other").exists()
    assert call("runs/mine/", "--resume", "--run-dir", "./runs/mine")[0] == 0


def test_a_name_of_the_library_is_a_recipe_whatever_lies_here(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped.rename("runs/digits_standard")
    monkeypatch.chdir("runs")
    with pytest.warns(UserWarning, match="nothing to resume in runs/digits_standard"):
        run = flatrock.train("digits_standard", resume=True, **KEYS)
    assert run.folder == Path("runs/digits_standard")


def test_who_listens_must_be_callable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_epoch must be a function of an epoch's record, got 3"):
        flatrock.train("digits_at", folder=tmp_path / "run", on_epoch=3)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_folders_that_are_no_run(stopped: Path) -> None:
    with pytest.raises(ConfigError, match=r"runs is a folder, neither a recipe nor a run: it has no run\.json"):
        flatrock.train("runs", resume=True)


def test_a_lost_recipe_is_that_of_the_state(stopped: Path) -> None:
    RunFolder(stopped).recipe.unlink()
    assert flatrock.train("runs/mine", resume=True).status == "finished"
    assert RunFolder(stopped).recipe.is_file()
