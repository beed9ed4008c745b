"""A recipe.yaml that is lost or damaged: commands say so, and --resume writes it again as the run's weights have it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from command_cases import flatrock, refusal

import flatrock as library
from flatrock.core.errors import StateError
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
