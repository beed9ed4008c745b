"""A finished run says what it was trained with, whatever it is resumed with afterwards."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_cases import flatrock, refusal
from interrupted import Ends
from start_cases import Told

import flatrock as library
from flatrock.workflows.results import collect_run

KEYS: dict[str, Any] = {"train__epochs": 2, "data__limit": 200, "select__size": 20, "evaluate__attacks": ["pgd-2"]}
# None of them is in the hash of a recipe.
FREE = ("engine.precision=bfloat16", "name=foo", "train.save_seconds=5", "train.keep.every=1", "train.tensorboard=true")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Copy it, do not change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    library.train("digits_standard", folder=folder, device="cpu", train__tensorboard=False, **KEYS)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def said_by(run: Path) -> tuple[str, str]:
    return (run / "recipe.yaml").read_text(), (run / "run.json").read_text()


@pytest.mark.parametrize("word", FREE)
@pytest.mark.parametrize("states", [True, False], ids=["with states", "without"])
def test_it_stays_as_it_was_trained(run: Path, word: str, states: bool) -> None:
    for file in () if states else run.glob("state*"):
        file.unlink()
    before = said_by(run)
    done = flatrock("train", run, word, "--resume", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "there is nothing left to train" in " ".join(done.output.split())
    assert said_by(run) == before and "resumed" not in json.loads(before[1])


@pytest.mark.parametrize("states", [True, False], ids=["with states", "without"])
def test_what_is_not_taken_over_is_told(run: Path, states: bool) -> None:
    for file in () if states else run.glob("state*"):
        file.unlink()
    ignored = r"which stays as it was trained; not taken over:\n  engine\."
    with pytest.warns(UserWarning, match=ignored) as told:
        library.train(run, resume=True, device="cpu", engine__precision="bfloat16")
    assert {one.filename for one in told} == {__file__}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not taken over")
        library.train(run, resume=True, device="cpu")


@pytest.mark.parametrize("most", [None, 3])
def test_one_that_was_killed_after_its_last_epoch_stays_too(made: Path, tmp_path: Path, most: int | None) -> None:
    run = tmp_path / "run"
    if most is None:
        shutil.copytree(made, run)
    else:
        cut = {**KEYS, "train__epochs": 5, "train__max_steps": most, "train__tensorboard": False}
        library.train("digits_standard", folder=run, device="cpu", **cut)
    recipe = (run / "recipe.yaml").read_text()
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**info, "status": "interrupted"}))
    done = flatrock("train", run, *FREE, "--resume", "--device", "cpu")
    assert done.exit_code == 0 and "not taken over" in done.output
    assert (run / "recipe.yaml").read_text() == recipe
    assert json.loads((run / "run.json").read_text())["status"] == info["status"]


def test_only_what_is_evaluated_changes(run: Path) -> None:
    before = yaml.safe_load((run / "recipe.yaml").read_text())
    done = flatrock("train", run, "evaluate.attacks=[fgsm]", "engine.precision=bfloat16", "--resume", "--device", "cpu")
    assert done.exit_code == 0, done.output
    after = yaml.safe_load((run / "recipe.yaml").read_text())
    assert after["evaluate"]["attacks"] == ["fgsm"]
    assert {**after, "evaluate": 0, "about": 0} == {**before, "evaluate": 0, "about": 0}


def test_its_files_are_mended_all_the_same(run: Path) -> None:
    before, records = said_by(run), (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("?")
    (run / "last.safetensors").write_bytes(b"junk")
    library.train(run, resume=True, device="cpu")
    assert said_by(run) == before and (run / "metrics.jsonl").read_text() == records
    library.load(run, which="last")


def test_a_lost_certificate_is_written_once(run: Path) -> None:
    """Where run.json was lost, resuming is all that tells where a run comes from."""
    (run / "run.json").write_text("{")
    for _ in range(2):
        library.train(run, resume=True, device="cpu")
        assert len(json.loads((run / "run.json").read_text())["resumed"]) == 1


def test_a_step_that_is_trained_again_is_of_the_same_engine(run: Path) -> None:
    """The older state is not that of the end: what is missing is trained, as the rest was."""
    recipe = (run / "recipe.yaml").read_text()
    (run / "state.safetensors").write_bytes(b"junk")
    library.train(run, resume=True, device="cpu", engine__precision="bfloat16")
    (again,) = json.loads((run / "run.json").read_text())["resumed"]
    assert again["engine"]["precision"] == "float32" and (run / "recipe.yaml").read_text() == recipe


def test_more_epochs_are_another_recipe_as_ever(run: Path) -> None:
    before = said_by(run)
    assert "train.epochs: 2 there, 3 asked for" in refusal(flatrock("train", run, "train.epochs=3", "--resume"))
    assert said_by(run) == before


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that was interrupted in its second epoch."""
    with pytest.raises(KeyboardInterrupt):
        library.train("digits_standard", folder=tmp_path / "stopped", progress=Ends(7, KeyboardInterrupt), **KEYS)
    return tmp_path / "stopped"


def test_another_precision_is_told_when_a_run_goes_on_and_in_its_row(stopped: Path) -> None:
    with pytest.warns(
        UserWarning, match="stopped continues in bfloat16, began in float32; run.json and its row"
    ) as told:
        library.train(stopped, resume=True, device="cpu", engine__precision="bfloat16")
    assert told[0].filename == __file__
    about = collect_run(stopped).provenance
    assert about["engine"]["precision"] == "float32"
    assert [again["engine"]["precision"] for again in about["continued"]] == ["bfloat16"]


def test_the_same_precision_is_nothing_to_tell(stopped: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library.train(stopped, resume=True, device="cpu")
    assert "continued" not in collect_run(stopped).provenance


def test_processes_that_train_together_tell_it_once(tmp_path: Path) -> None:
    """They are told apart by their listeners: the one that leads is heard."""
    how: dict[str, Any] = {**KEYS, "train__epochs": 6, "folder": tmp_path / "run", "device": ["cpu", "cpu"]}
    with pytest.raises(KeyboardInterrupt):
        library.train("digits_standard", progress=Ends(7, KeyboardInterrupt), **how)
    ears = Told()
    library.train("digits_standard", resume=True, progress=ears, engine__precision="bfloat16", **how)
    assert sum("continues in bfloat16, began in float32" in text for text in ears.said) == 1
