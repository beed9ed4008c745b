"""Test samples that are training samples, too: an evaluation of a run on the user's own data says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from start_cases import Told

from flatrock.core.records import Result
from flatrock.data.catalog import load_data
from flatrock.recipes.load import load_recipe
from flatrock.workflows.evaluate import evaluate_run, store_result
from flatrock.workflows.train import train_recipe

OWN = {
    "data": {"name": "npz", "held_out": 20},
    "model.num_classes": 2,
    "data.augment": {},
    "train": {"epochs": 1, "batch_size": 50},
}


def run_on(folder: Path, *, copied: int) -> Path:
    """A run on points of the two moons in files, some of which are in both."""
    for split in ("train", "test"):
        data = load_data("moons", split, points=120)  # type: ignore[arg-type]
        x, y = data.x.numpy(), data.y.numpy()
        if split == "train":
            first = x[:copied], y[:copied]
        else:
            x[10 : 10 + copied], y[10 : 10 + copied] = first
        np.savez(folder / f"{split}.npz", x=x, label=y)
    return train_recipe(load_recipe("moons_at", OWN), folder=folder / "run", data_dir=folder).folder


def told(run: Path, **more: Any) -> list[str]:
    result = asked(run, **more)
    return [finding.message for finding in result.findings if finding.code == "E18"]


def asked(run: Path, **more: Any) -> Result:
    return evaluate_run(run, **{"attacks": ["fgsm"], "doubt": True, "data_folder": run.parent, **more})


def test_test_samples_that_were_trained_on_are_a_finding(tmp_path: Path) -> None:
    run = run_on(tmp_path, copied=7)
    assert told(run) == ["7 of the 120 test samples are in the training set, too"]
    assert told(run, limit=12, first=True) == ["2 of the 12 test samples are in the training set, too"]
    assert told(run, doubt=False) == []


def test_a_result_that_is_read_again_says_it_once(tmp_path: Path) -> None:
    run = run_on(tmp_path, copied=3)
    result = asked(run, journal=True)
    file = store_result(run, result)
    assert asked(run, resume=True).to_json() == result.to_json() == file.read_text()
    assert [f.code for f in result.findings].count("E18") == 1


def test_samples_of_ones_own_are_no_finding(tmp_path: Path) -> None:
    assert told(run_on(tmp_path, copied=0)) == []


def test_whoever_only_tests_needs_no_training_set(tmp_path: Path) -> None:
    run, progress = run_on(tmp_path, copied=7), Told()
    (tmp_path / "train.npz").unlink()
    assert told(run, progress=progress) == []
    (said,) = [line for line in progress.said if line.startswith("not compared with the training set: ")]
    assert "train.npz" in said


def test_a_result_of_before_is_read_as_it_is(tmp_path: Path) -> None:
    """One that says nothing of it answers the question, too."""
    run = run_on(tmp_path, copied=3)
    file = store_result(run, asked(run, journal=True))
    older = replace(Result.from_json(file.read_text()), findings=())
    file.write_text(older.to_json())
    assert asked(run, resume=True).to_json() == older.to_json()


def test_images_of_a_function_of_ones_own(here: Path) -> None:
    (here / "mydata.py").write_text(
        "import torch\nfrom torch import Tensor\n\n\n"
        "def make(split: str) -> tuple[Tensor, Tensor]:\n"
        "    x = 0.5 + 0.001 * torch.rand(90, 1, 8, 8, generator=torch.Generator().manual_seed(len(split)))\n"
        "    if split == 'test':\n"
        "        x[:4] = make('train')[0][20:24]\n"
        "    return x, torch.arange(90) % 10\n"
    )
    own = {**OWN, "data": {"name": "mydata:make", "held_out": 20}, "model.num_classes": 10, "train.max_steps": 1}
    run = train_recipe(load_recipe("digits_at", own), folder="run").folder
    found = [
        f.message for f in evaluate_run(run, which="last", attacks=["fgsm"], doubt=True).findings if f.code == "E18"
    ]
    assert found == ["4 of the 90 test samples are in the training set, too"]


def test_data_that_everybody_has_are_not_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = train_recipe(load_recipe("moons_at", {"train": {"epochs": 1}}), folder=tmp_path / "run").folder
    monkeypatch.setattr("flatrock.recipes.leak.shared_samples", lambda *_: pytest.fail("compared"))
    assert told(run) == []
