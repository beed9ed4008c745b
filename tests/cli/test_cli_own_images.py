"""`flatrock check` and `flatrock train` agree about images of one's own, whose number and size only the files know."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from flatrock.cli.main import app
from flatrock.core.tensorfile import load

OWN = ("data={name: folder, channels: 1, held_out: 4}", "model.num_classes=2", "train.batch_size=8")


def flatrock(command: str, *words: str | Path) -> Result:
    return CliRunner().invoke(app, [command, "digits_at", *OWN, *[str(w) for w in words], "--device", "cpu"])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten grey 8x8 images of each of two classes."""
    folder = tmp_path_factory.mktemp("own")
    for split in ("train", "test"):
        for name, grey in (("cat", 30), ("dog", 220)):
            (folder / split / name).mkdir(parents=True)
            for i in range(10):
                Image.new("L", (8, 8), grey + i).save(folder / split / name / f"{i}.png")
    return folder


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("model.num_classes=3", "model.num_classes is 3, but 'folder' has 2 classes"),
        ("data.held_out=15", "cannot hold out 15 of the 20 samples"),
        ("train.batch_size=64", "batch_size must lie in 1..16"),
        ("model.name=mnist_cnn", "the model takes inputs (1, 28, 28), 'folder' has (1, 8, 8); set data.size=28 (and"),
    ],
)
def test_check_refuses_what_training_refuses(images: Path, tmp_path: Path, override: str, fault: str) -> None:
    checked = flatrock("check", override, "--data-dir", images)
    trained = flatrock("train", override, "--data-dir", images, "--run-dir", tmp_path / "r")
    assert (checked.exit_code, trained.exit_code) == (2, 2)
    assert checked.stderr == trained.stderr
    assert fault in checked.stderr
    assert "valid" not in checked.stdout


def test_check_counts_the_images_or_says_that_it_did_not(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = flatrock("check", "--data-dir", images)
    assert done.exit_code == 0, done.output
    assert f"data         {images} (train and test)" in done.output
    assert "(2 per epoch over 16 samples)" in done.output
    monkeypatch.setenv("FLATROCK_DATA", str(images / "nowhere"))
    done = flatrock("check")
    assert done.exit_code == 0, done.output
    assert f"data         not found in {images / 'nowhere'}" in done.output
    assert "not checked  number, size and classes of the images" in done.output


def test_train_and_eval(images: Path, tmp_path: Path) -> None:
    words = ("train.epochs=4", "--data-dir", images, "--run-dir", tmp_path / "r")
    trained = flatrock("train", *words)
    assert trained.exit_code == 0, trained.output
    (following,) = [line for line in trained.output.splitlines() if line.startswith("next: flatrock ")]
    said = shlex.split(following.removeprefix("next: flatrock "))
    assert said == ["eval", str(tmp_path / "r"), "--data-dir", str(images)]
    evaluated = CliRunner().invoke(app, [*said, "--device", "cpu"])
    assert evaluated.exit_code == 0, evaluated.output
    assert "folder test, 20 of 20 samples" in evaluated.output


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twelve grey images of each of two classes, no two of one size."""
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(12):
                grey = np.random.default_rng(i).integers(
                    100 * label, 100 * label + 100, (9 + i, 30 - i), dtype=np.uint8
                )
                Image.fromarray(grey.astype(np.uint8)).save(tmp_path / split / name / f"{i}.jpg")
    return tmp_path


SIZED = ("data.size=8", "data.resize=9", "train.epochs=10", "train.batch_size=8")


def test_images_of_many_sizes_train_alike_in_memory_and_in_files(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = flatrock("train", "--data-dir", photos, "--run-dir", tmp_path / "r")
    assert refused.exit_code == 2
    assert "give data.size to have squares of one size cut out" in refused.stderr
    weights = []
    for held in (1 << 30, 0):
        monkeypatch.setattr("flatrock.data.folder.HELD", held)
        run = tmp_path / f"run{held}"
        trained = flatrock("train", *SIZED, "--data-dir", photos, "--run-dir", run)
        assert trained.exit_code == 0, trained.output
        evaluated = CliRunner().invoke(app, ["eval", str(run), "--data-dir", str(photos), "--device", "cpu"])
        assert "folder test, 24 of 24 samples" in evaluated.output
        weights.append((load(run / "last.safetensors")[0], evaluated.output.partition("wrote")[0]))
    (held_ones, table), (read_ones, same_table) = weights
    assert held_ones.keys() == read_ones.keys()
    assert all(torch.equal(held_ones[name], read_ones[name]) for name in held_ones)
    assert [line for line in table.splitlines() if "%" in line] == [
        line for line in same_table.splitlines() if "%" in line
    ]


def test_check_finds_every_damaged_image(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatrock.data.folder.HELD", 0)
    done = flatrock("check", *SIZED, "--data-dir", photos, "--every-image")
    assert done.exit_code == 0, done.output
    assert "images       every one can be decoded" in done.output
    for name in ("train/cat/3.jpg", "val/dog/5.jpg"):
        (photos / name).write_bytes((photos / name).read_bytes()[:100])
    monkeypatch.setattr("flatrock.cli.check.MOST_SHOWN", 1)
    done = flatrock("check", *SIZED, "--data-dir", photos, "--every-image")
    assert done.exit_code == 2
    assert "2 images cannot be read:" in done.stderr
    assert f"{photos / 'train/cat/3.jpg'} cannot be decoded" in done.stderr
    assert "and 1 more" in done.stderr
