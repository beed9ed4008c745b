"""A small trained run, shared by the command-line tests; the brackets in its name must come out as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.evaluation.exam import Exam

TINY = ("train.epochs=3", "data.limit=512", "train.batch_size=64", "attack.steps=2", "select.size=40")


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    return TINY


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only, but for results of evaluations."""
    folder = tmp_path_factory.mktemp("runs") / "tiny[a]"
    done = CliRunner().invoke(app, ["train", "digits_at", *TINY, "--run-dir", str(folder), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert f"next: flatrock eval '{folder}'" in done.output
    return folder


@pytest.fixture
def copied(run_folder: Path, tmp_path: Path) -> Path:
    """The run without results: what is left in it is nobody else's obstacle."""
    return Path(shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("result-*")))


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry with every batch that is attacked."""
    made: list[int] = []
    attempt = Exam.attempt
    monkeypatch.setattr(Exam, "attempt", lambda *args: made.append(1) or attempt(*args))
    return made
