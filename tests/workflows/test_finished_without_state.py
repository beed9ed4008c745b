"""A finished run whose states were deleted is still finished: resuming it does nothing, and destroys nothing."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from command_cases import flatrock, refusal
from interrupted import Ends

import flatrock as library
from flatrock.core.errors import StateError
from flatrock.engine.folder import RunFolder

WORDS = ("train.epochs=2", "data.limit=200", "select.size=20", "evaluate.attacks=[pgd-2]", "train.tensorboard=false")
KEYS: dict[str, Any] = {"train__epochs": 2, "data__limit": 200, "select__size": 20, "evaluate__attacks": ["pgd-2"]}
STATES = ("state.safetensors", "state.older.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run without states. Copy it, do not change it."""
    folder = tmp_path_factory.mktemp("lean") / "run"
    library.train("digits_standard", folder=folder, device="cpu", train__tensorboard=False, **KEYS)
    for name in STATES:
        (folder / name).unlink()
    return folder


@pytest.fixture
def lean(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "curves.png"}


def train(folder: Path, *words: str) -> Any:
    return flatrock("train", "digits_standard", *WORDS, "--run-dir", folder, "--device", "cpu", *words)


def test_resuming_it_says_so_and_changes_nothing(lean: Path) -> None:
    before = contents(lean)
    done = train(lean, "--resume")
    assert done.exit_code == 0, done.output
    assert f"{lean} is finished: there is nothing left to train" in done.output
    assert "finished: 2 epochs" in done.output and f"next: flatrock eval {lean}" in done.output
    by_folder = flatrock("train", lean, "--resume", "--device", "cpu")
    assert by_folder.exit_code == 0 and "nothing left to train" in by_folder.output
    assert contents(lean) == before


def test_python_is_told_by_a_warning_that_names_the_caller(lean: Path) -> None:
    with pytest.warns(UserWarning, match="is finished: there is nothing left to train") as caught:
        run = library.train(lean, resume=True)
    assert (run.status, len(run.records)) == ("finished", 2)
    assert caught[0].filename == __file__


def test_no_data_and_no_second_device_are_needed(lean: Path, tmp_path: Path) -> None:
    """Nothing is trained, so nothing that training needs is asked for; on several devices, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = library.train(lean, resume=True, device=["cpu", "cpu"], data_dir=tmp_path / "nowhere")
    assert run.status == "finished"


def test_seeds_of_which_some_are_finished(lean: Path) -> None:
    shutil.copytree(lean, lean.with_name("x-seed0"))
    done = train(lean.with_name("x"), "--seeds", "0,1", "--resume")
    assert done.exit_code == 0, done.output
    assert "x-seed0 is finished: there is nothing left to train" in done.output
    assert "mean ± s.d. of 2" in done.output
    assert not (lean.with_name("x-seed0") / "state.safetensors").exists()


def test_reproduce_evaluates_it_and_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "digits_standard", *WORDS, "--device", "cpu")
    assert flatrock(*words).exit_code == 0
    (run,) = [p.parent for p in Path("runs").glob("*/run.json")]
    for name in (*STATES, "result-best.json"):
        (run / name).unlink()
    before = (run / "best.safetensors").stat().st_mtime_ns
    again = flatrock(*words)
    assert again.exit_code == 0, again.output
    assert (run / "result-best.json").is_file() and (run / "best.safetensors").stat().st_mtime_ns == before


def test_other_attacks_are_taken_over_as_resuming_does(lean: Path) -> None:
    done = train(lean, "evaluate.attacks=[fgsm]", "--resume")
    assert done.exit_code == 0, done.output
    assert "- fgsm" in (lean / "recipe.yaml").read_text()


def test_another_recipe_is_refused_with_what_differs(lean: Path) -> None:
    before = contents(lean)
    said = refusal(train(lean, "optimizer.lr=0.3", "--resume"))
    assert "is a finished run of another recipe; differences: optimizer.lr: " in said
    assert "choose another --run-dir" in said and "--overwrite" not in said
    assert contents(lean) == before


def test_lost_records_are_told_without_a_cure_that_destroys(lean: Path) -> None:
    metrics = lean / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    said = refusal(train(lean, "--resume"))
    assert "has lost epochs, and there is no state.safetensors to mend it with; put the file back from a copy" in said
    assert "--overwrite" not in said
    assert library.load(lean)(torch.rand(1, 1, 8, 8)).shape == (1, 10)


def test_damaged_states_of_a_finished_run_are_no_reason_to_start_again(tmp_path: Path) -> None:
    library.train("digits_standard", folder=tmp_path / "run", device="cpu", **KEYS)
    for name in STATES:
        (tmp_path / "run" / name).write_bytes(b"damaged")
    said = refusal(train(tmp_path / "run", "--resume"))
    assert "the run has ended and needs no state: use it as it is, and delete states that are damaged" in said
    assert "--overwrite" not in said


@pytest.mark.parametrize("status", ["interrupted", "failed", "running"])
def test_one_that_has_not_ended_needs_its_state(tmp_path: Path, status: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        library.train("digits_standard", folder=tmp_path / "run", progress=Ends(7, KeyboardInterrupt), **KEYS)
    RunFolder(tmp_path / "run").write_info(status=status)
    for name in STATES:
        (tmp_path / "run" / name).unlink(missing_ok=True)
    with pytest.raises(
        StateError, match=r"cannot be resumed: there is no state\.safetensors; train it anew in another"
    ):
        library.train(tmp_path / "run", resume=True)
    (tmp_path / "run" / "metrics.jsonl").unlink(missing_ok=True)
    (tmp_path / "run" / "last.safetensors").unlink(missing_ok=True)
    with pytest.raises(StateError, match=r"start again with --overwrite .*: no epoch of it was finished"):
        library.train(tmp_path / "run", resume=True)


def test_a_damaged_run_json_without_a_state(lean: Path) -> None:
    (lean / "run.json").write_text("{")
    said = refusal(train(lean, "--resume"))
    assert "cannot be resumed: there is no state.safetensors; train it anew in another --run-dir" in said
