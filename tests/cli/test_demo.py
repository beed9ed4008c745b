"""The demo: a comparison whatever happens, and an exit code that tells."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from flatrock.core.errors import TrainingError
from flatrock.core.records import Result
from flatrock.core.runs import Run
from flatrock.workflows.train import train_recipe

SHORT = {"train.epochs": 1, "data.limit": 640, "train.batch_size": 32, "attack.steps": 1, "select.size": 40}


@pytest.fixture
def demo() -> ModuleType:
    path = Path(__file__).parents[2] / "examples/demo.py"
    spec = importlib.util.spec_from_file_location("demo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_failed_run_is_a_row_and_the_rest_goes_on(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, **options: Any) -> Run:
        if name == "digits_at":
            raise TrainingError("the loss [ce] became non-finite")
        return train_recipe(name, **options, **SHORT)

    monkeypatch.setattr(demo, "train_recipe", train)
    with pytest.raises(typer.Exit) as ended:
        demo.main(tmp_path)
    assert ended.value.exit_code == 1
    said = capsys.readouterr()
    assert "FAILED: the loss [ce] became non-finite" in said.err
    headings = [line.partition(" (")[0].strip() for line in said.out.splitlines() if "so far)" in line]
    assert headings == [f"{i}/5 {name}" for i, name in enumerate(demo.RECIPES, 1)]
    row = next(line for line in said.out.splitlines() if line.startswith("│ digits_at "))
    assert row.replace("│", " ").split() == ["digits_at", "FAILED"]
    for name in ("digits_standard", "digits_trades", "digits_trades_awp", "digits_trades_rat"):
        (file,) = (tmp_path / name).glob("result*.json")
        result = Result.from_json(file.read_text())
        row = next(line for line in said.out.splitlines() if line.startswith(f"│ {name} "))
        assert f"{100 * result.clean:.2f}" in row
        assert f"{100 * result.robust:.2f}" in row
    assert (tmp_path / "learning_curves.png").is_file()
    assert max(len(line) for line in said.out.splitlines() if str(tmp_path) not in line) <= 80


def test_all_runs_failed(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, **options: Any) -> Run:
        raise TrainingError("collapsed")

    monkeypatch.setattr(demo, "train_recipe", train)
    with pytest.raises(typer.Exit) as ended:
        demo.main(tmp_path)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().out.count("FAILED") == len(demo.RECIPES)


def test_interrupted_demo(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, **options: Any) -> Run:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train_recipe", train)
    with pytest.raises(typer.Exit) as ended:
        demo.main(tmp_path)
    assert ended.value.exit_code == 130
    assert "start the demo again" in capsys.readouterr().err
