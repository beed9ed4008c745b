"""Arrays of one's own, from files or from a function: every command takes them, and training on them is the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from flatrock.cli.main import app
from flatrock.core.tensorfile import load
from flatrock.data.catalog import load_data
from flatrock.recipes.restore import load as load_model

NPZ = ("data={name: npz, held_out: 60}",)
FUNCTION = ("data={name: own_points:make, held_out: 60}",)
SMALL = ("model.num_classes=2", "train.epochs=2", "train.batch_size=50", "data.augment={}")
MADE = """
from torch import Tensor
from flatrock.data.catalog import load_data


def make(split: str, points: int = 200) -> tuple[Tensor, Tensor]:
    data = load_data("moons", split, points=points)
    return data.x, data.y
"""


def flatrock(*words: str | Path) -> Result:
    return CliRunner().invoke(
        app, [*[str(w) for w in words], *(() if words[0] in ("ls", "doctor") else ("--device", "cpu"))]
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """200 points of the two moons in files and made by a function, and the same networks for others."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        data = load_data("moons", split, points=200)  # type: ignore[arg-type]
        np.savez(tmp_path / f"{split}.npz", x=data.x.numpy(), label=data.y.numpy())
    (tmp_path / "own_points.py").write_text(MADE)
    yield tmp_path
    sys.modules.pop("own_points", None)


def trained(folder: Path, *words: str) -> Path:
    done = flatrock("train", "moons_at", *SMALL, *words, "--data-dir", ".", "--run-dir", folder)
    assert done.exit_code == 0, done.output
    return folder


def test_files_and_function_train_alike_and_are_evaluated(here: Path) -> None:
    files, function = trained(here / "a", *NPZ), trained(here / "b", *FUNCTION)
    (ours, _), (theirs, _) = (load(folder / "last.safetensors") for folder in (files, function))
    # The name of the data decides which samples are held out; with none of that the weights are the same.
    assert ours.keys() == theirs.keys()
    none = ("data.held_out=0", "select=test")
    ours, theirs = (
        load(trained(here / n, *d, *none) / "last.safetensors")[0] for n, d in (("c", NPZ), ("d", FUNCTION))
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    known = trained(here / "e", "data={name: moons, points: 200}", *none)
    moons = load(known / "last.safetensors")[0]
    assert all(torch.equal(ours[name], moons[name]) for name in ours), "the same samples under another name"
    for run, name in ((files, "npz"), (function, "own_points:make")):
        done = flatrock("eval", run, "--data-dir", ".", "--attacks", "pgd-5")
        assert done.exit_code == 0, done.output
        assert f"{name} test, 200 of 200 samples" in done.output


def test_other_commands_take_them(here: Path) -> None:
    run = trained(here / "run", *NPZ)
    words = {
        "curvature": ("--images", "40", "--steps", "4", "--top", "1"),
        "landscape": ("--images", "20", "--directions", "2", "--points", "3"),
        "certify": ("--sigma", "0.1", "--limit", "4", "--n", "200"),
    }
    for command, more in words.items():
        done = flatrock(command, run, "--data-dir", ".", *more)
        assert done.exit_code == 0, (command, done.output)


@pytest.mark.parametrize("name", ["npz", "own_points:make"])
def test_models_of_others_are_evaluated_on_them(here: Path, name: str) -> None:
    run = trained(here / "run", *NPZ)
    torch.save(load_model(run).state_dict(), here / "w.pt")
    words = ("--model", "moons_mlp", "--weights", "w.pt", "--normalize", "moons", "--data", name, "--data-dir", ".")
    done = flatrock("eval", *words, "--norm", "linf", "--eps", "0.01", "--attacks", "pgd-5")
    assert done.exit_code == 0, done.output
    assert f"{name} test, 200 of 200 samples" in done.output


CASES = [
    ("model.num_classes=3", "model.num_classes is 3, but 'NAME' has 2 classes; set model.num_classes=2"),
    ("model.name=digits_cnn", "the model takes inputs (1, 8, 8), 'NAME' has (2,); choose a model for such inputs"),
    ("data.held_out=150", "cannot hold out 150 of the 200 samples of 'NAME'; choose 1 to 100"),
    ("data.augment.flip=true", "data.augment: 'NAME' holds points, not images; only mixup applies"),
]


@pytest.mark.parametrize(("override", "fault"), CASES)
@pytest.mark.parametrize("data", [NPZ, FUNCTION], ids=["npz", "function"])
def test_check_refuses_what_training_refuses(here: Path, data: tuple[str], override: str, fault: str) -> None:
    words = ("moons_at", *SMALL, *data, "model.normalize=null", override, "--data-dir", ".")
    checked, done = flatrock("check", *words), flatrock("train", *words, "--run-dir", here / "r")
    assert (checked.exit_code, done.exit_code) == (2, 2), checked.output
    assert checked.stderr == done.stderr
    assert fault.replace("NAME", "npz" if data is NPZ else "own_points:make") in checked.stderr
    assert not (here / "r").exists()


def test_check_counts_samples_and_names_where_they_are(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = flatrock("check", "moons_at", *SMALL, *NPZ, "--data-dir", here)
    assert done.exit_code == 0, done.output
    assert f"data         {here} (train.npz and test.npz)" in done.output
    assert "(3 per epoch over 140 samples)" in done.output
    done = flatrock("check", "moons_at", *SMALL, *FUNCTION)
    assert f"data         {here / 'own_points.py'}" in done.output
    assert "(3 per epoch over 140 samples)" in done.output
    monkeypatch.setenv("FLATROCK_DATA", str(here / "nowhere"))
    done = flatrock("check", "moons_at", *SMALL, *NPZ)
    assert done.exit_code == 0, done.output
    assert f"data         not found in {here / 'nowhere'}" in done.output
    assert "not checked" in done.output


def test_options_of_a_function_and_those_it_does_not_take(here: Path) -> None:
    done = flatrock("check", "moons_at", *SMALL, *FUNCTION, "data.points=120")
    assert "over 60 samples)" in done.output
    for word, fault in (
        ("data.point=120", "'point'; known: points; did you mean 'points'"),
        ("data.folder=x", "unknown key 'folder'"),
    ):
        done = flatrock("check", "moons_at", *SMALL, *FUNCTION, word)
        assert done.exit_code == 2
        assert fault in done.stderr
    done = flatrock("check", "moons_at", *SMALL, "data={name: nowhere:make}")
    assert done.exit_code == 2
    assert "'nowhere' is not a module of the current folder" in done.stderr


def test_weights_are_loaded_where_the_function_is_not(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(here / "run", *FUNCTION)
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    assert load_model(run).num_classes == 2
    done = flatrock("eval", run)
    assert done.exit_code == 2
    assert "'own_points' is not a module of the current folder" in done.stderr


def test_they_are_listed_and_found(here: Path) -> None:
    assert "npz " in flatrock("ls", "data").output
    assert "FILE:function" in flatrock("ls", "data").output
    assert "(train.npz and test.npz)" in flatrock("doctor", "--data-dir", ".").output
