"""A recipe.yaml that is lost or damaged: commands say so, and --resume writes it again as the run's weights have it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_cases import flatrock, refusal

import flatrock as library
from flatrock.core.errors import ConfigError, StateError
from flatrock.engine.folder import RunFolder
from flatrock.recipes.load import load_recipe
from flatrock.recipes.schema import Recipe
from flatrock.workflows.finished import finished_before
from flatrock.workflows.results import collect_run

KEYS: dict[str, Any] = {
    "train__epochs": 2,
    "train__tensorboard": False,
    "train__save_seconds": 7.5,  # not in the hash: nothing but a stored recipe knows it
    "data__limit": 200,
    "select__size": 20,
    "evaluate__attacks": ["pgd-2"],
}
DAMAGED = {"empty": b"", "a list": b"[1, 2]", "cut": b"a: [", "no text": b"\xff\xfe\xff"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Copy it, do not change it."""
    folder = tmp_path_factory.mktemp("recipe") / "run"
    library.train("digits_standard", folder=folder, device="cpu", **KEYS)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def asked_for(**more: Any) -> Recipe:
    """The recipe of the run, by its name in the library."""
    return load_recipe("digits_standard", {key.replace("__", "."): value for key, value in {**KEYS, **more}.items()})


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_commands_name_the_file_and_the_cure(run: Path, content: bytes) -> None:
    (run / "recipe.yaml").write_bytes(content)
    for words in (
        ("eval", run, "--limit", "5"),
        ("results", run, "--csv", run / "x.csv"),
        ("results", run, "--out", run / "x.json"),
    ):
        said = refusal(flatrock(*words))
        assert f"{run}/recipe.yaml is " in said and "`train --resume` writes it again" in said
        assert "section is required" not in said


def test_what_is_no_mapping_is_said_to_be_none(run: Path) -> None:
    for text, kind in (("", "NoneType"), ("[1, 2]", "list"), ("7", "int")):
        (run / "recipe.yaml").write_text(text)
        with pytest.raises(StateError, match=rf"is damaged: it must be a mapping of sections, got {kind}; `train"):
            collect_run(run)


@pytest.mark.parametrize("content", [*DAMAGED.values(), None], ids=[*DAMAGED, "lost"])
@pytest.mark.parametrize("left", ["all", "the older state", "checkpoints", "best"])
def test_the_cure_works(run: Path, content: bytes | None, left: str) -> None:
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").unlink() if content is None else (run / "recipe.yaml").write_bytes(content)
    gone = {"the older state": ("state",), "checkpoints": ("state", "state.older")}
    for name in gone.get(left, ()) if left != "best" else ("state", "state.older", "last"):
        (run / f"{name}.safetensors").unlink()
    done = flatrock("train", run, "--resume", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert f"{run}/recipe.yaml cannot be read and is written again" in " ".join(done.output.split())
    assert yaml.safe_load((run / "recipe.yaml").read_text()) == yaml.safe_load(recipe)
    assert flatrock("eval", run, "--limit", "5", "--device", "cpu").exit_code == 0


def test_by_the_name_of_its_recipe_it_is_written_as_it_was_trained(run: Path) -> None:
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    asked = asked_for(name="foo", train__save_seconds=120)
    (run / "recipe.yaml").write_text("")
    for states in (True, False):
        for file in () if states else run.glob("state*"):
            file.unlink()
        library.train(asked, folder=run, resume=True, device="cpu")
        assert yaml.safe_load((run / "recipe.yaml").read_text()) == recipe
        (run / "recipe.yaml").unlink()


def test_without_weights_the_name_of_the_recipe_is_asked_for(run: Path) -> None:
    for file in run.glob("*.safetensors"):
        file.unlink()
    (run / "recipe.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"got NoneType\nno state or checkpoint of run .*resume it by the name of"):
        library.train(run, resume=True)
    recipe = asked_for()
    assert finished_before(recipe, run, None) is not None
    assert yaml.safe_load((run / "recipe.yaml").read_text()) == recipe.resolved()


def test_one_that_was_edited_is_not_written_over_without_a_word(run: Path) -> None:
    for file in run.glob("state*"):
        file.unlink()
    edited = (run / "recipe.yaml").read_text().replace("limit: 200", "limit: 300")
    (run / "recipe.yaml").write_text(edited)
    asked = asked_for()
    with pytest.raises(StateError, match="was edited"):
        library.train(asked, folder=run, resume=True)
    assert (run / "recipe.yaml").read_text() == edited
    assert RunFolder(run).run().status == "finished"
