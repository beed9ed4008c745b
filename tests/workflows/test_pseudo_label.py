"""Robust self-training: a trained run labels images, another trains on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.core.errors import ConfigError, DataError, ModelError, StateError
from flatrock.core.provenance import commit
from flatrock.data import npz
from flatrock.data.catalog import load_data
from flatrock.engine.loop import train
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.restore import load
from flatrock.workflows.pseudo_label import pseudo_label

TEACHER = {"train.epochs": 2, "train.batch_size": 32, "data.limit": 640, "attack.steps": 1, "select.attack": "fgsm"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the digits, read-only."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    train(build_job(load_recipe("digits_at", TEACHER), folder=folder))
    return folder


@pytest.fixture(scope="module")
def truth() -> torch.Tensor:
    return load_data("digits", "test").y


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """The test digits without their labels."""
    data = load_data("digits", "test")
    pixels = (data.images(torch.arange(len(data))) * 255).round().to(torch.uint8)
    np.savez(tmp_path / "images.npz", image=pixels.permute(0, 2, 3, 1).numpy())
    return tmp_path / "images.npz"


class Heard:
    """A listener that counts."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.ended = False

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.total = total

    def advance(self, units: int, note: str = "") -> None:
        self.done += units

    def end(self) -> None:
        self.ended = True

    def say(self, text: str) -> None:
        raise AssertionError(text)


def test_labels_are_the_models_answers(teacher: Path, images: Path, truth: torch.Tensor, tmp_path: Path) -> None:
    heard = Heard()
    done = pseudo_label(teacher, images, tmp_path / "out.npz", batch_size=64, progress=heard)
    assert (heard.total, heard.done, heard.ended) == (500, 500, True)
    with np.load(tmp_path / "out.npz", allow_pickle=False) as content:
        assert set(content) == {"image", "label", "confidence", "provenance"}
        image, label, confidence = content["image"], content["label"], content["confidence"]
        provenance: dict[str, Any] = json.loads(str(content["provenance"]))
    with np.load(images) as given:
        assert np.array_equal(given["image"], image)
    x = torch.from_numpy(image).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        expected = load(teacher)(x).softmax(1)
    assert label.tolist() == expected.argmax(1).tolist()
    torch.testing.assert_close(torch.from_numpy(confidence), expected.amax(1), rtol=1e-5, atol=1e-6)
    assert float((torch.from_numpy(label) == truth).double().mean()) > 0.5
    assert done.counts == {str(k): int((label == k).sum()) for k in range(10)}
    assert done.confidence == pytest.approx(float(confidence.mean()), rel=1e-6)
    assert str(done).startswith(f"500 images, mean confidence {done.confidence:.3f}: 0 {done.counts['0']}, 1 ")
    info = json.loads((teacher / "run.json").read_text())
    assert provenance == done.provenance
    assert provenance["recipe_hash"] == info["recipe_hash"]
    assert (provenance["run"], provenance["recipe"], provenance["checkpoint"]) == (
        "run",
        "digits_at",
        "best.safetensors",
    )
    assert (provenance["commit"], provenance["images"], provenance["marks"]) == (commit(), "images.npz", [])


@pytest.mark.parametrize("which", ["best", "last"])
def test_any_checkpoint_and_any_batch_size(which: str, teacher: Path, images: Path, tmp_path: Path) -> None:
    by_folder = pseudo_label(teacher, images, tmp_path / "a.npz", which=which, batch_size=500)
    by_file = pseudo_label(teacher / f"{which}.safetensors", images, tmp_path / "b.npz", batch_size=7)
    assert by_folder.counts == by_file.counts
    assert by_folder.provenance["checkpoint"] == by_file.provenance["checkpoint"] == f"{which}.safetensors"


def test_a_student_trains_on_the_mixture(teacher: Path, images: Path, run_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "labelled.npz"
    pseudo_label(teacher, images, file)
    labels = npz.load(file, num_classes=10).y
    two_steps = {"data.limit": 32, "train.batch_size": 16, "train.max_steps": 2, "data.held_out": 50}
    recipe = load_recipe("digits_trades", {**two_steps, "data.extra.file": str(file), "data.extra.fraction": "1/2"})
    job = build_job(recipe, folder=run_folder)
    batch = next(iter(job.loader.epoch(0)))
    assert batch.y.shape == (16,)
    assert set(batch.y[8:].tolist()) <= set(labels.tolist())
    run = train(job)
    assert [r.step for r in run.records] == [2]
    assert all(np.isfinite(list(run.last.terms.values())))


def test_existing_files_are_left_alone(teacher: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    out.write_text("precious")
    with pytest.raises(StateError, match=r"out\.npz exists and is left alone; .*--overwrite"):
        pseudo_label(teacher, images, out)
    assert out.read_text() == "precious"
    pseudo_label(teacher, images, out, overwrite=True)
    assert len(npz.load(out, num_classes=10)) == 500
    assert sorted(p.name for p in tmp_path.iterdir()) == ["images.npz", "out.npz"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"image": np.zeros((3, 9, 8, 1), np.uint8)}, r"images \(1, 9, 8\) .*takes \(1, 8, 8\); resize them"),
        ({"image": np.zeros((3, 8, 8, 3), np.uint8)}, r"images \(3, 8, 8\) .*takes \(1, 8, 8\)"),
        ({"image": np.zeros((3, 8, 8, 1), np.float32)}, r"image must be uint8 \[M, H, W, C\], got float32"),
        ({"image": np.zeros((0, 8, 8, 1), np.uint8)}, "is empty"),
        ({"image": np.zeros((3, 8, 8, 1), np.uint8), "label": np.array([-1, 4, -1])}, "already has 1 labels"),
        ({"pictures": np.zeros((3, 8, 8, 1), np.uint8)}, r"lacks an array \(image\); .*; `label` is left out or -1"),
    ],
    ids=["size", "channels", "type", "empty", "labelled", "name"],
)
def test_files_that_cannot_be_labelled(content: dict[str, Any], message: str, teacher: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", **content)
    with pytest.raises(DataError, match=message):
        pseudo_label(teacher, tmp_path / "in.npz", tmp_path / "out.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["in.npz"]


def test_runs_and_options_that_cannot_be(teacher: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    with pytest.raises(StateError, match="no run folder or checkpoint"):
        pseudo_label(tmp_path / "nowhere", images, out)
    with pytest.raises(DataError, match=r"gone\.npz not found"):
        pseudo_label(teacher, tmp_path / "gone.npz", out)
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        pseudo_label(teacher, images, out, batch_size=0)
    with pytest.raises(ConfigError, match="unknown checkpoint 'bets'"):
        pseudo_label(teacher, images, out, which="bets")
    assert not out.exists()


def test_a_model_without_answers_labels_nothing(
    teacher: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        with torch.no_grad():
            model.head.bias[3] = torch.nan
        return model

    monkeypatch.setattr("flatrock.workflows.pseudo_label.load", broken)
    with pytest.raises(ModelError, match="NaN or infinite logits"):
        pseudo_label(teacher, images, tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


def test_command(teacher: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "x[a].npz"
    words = ["pseudo-label", str(teacher), "--images", str(images), "--out", str(out), "--device", "cpu"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"wrote {out}: 500 images, mean confidence 0.")
    assert len(done.output.splitlines()) == 1
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2
    assert again.stderr.startswith(f"error: {out} exists and is left alone")
    assert CliRunner().invoke(app, [*words, "--overwrite", "--which", "last", "--batch-size", "100"]).exit_code == 0
