"""Shared by the recipe tests: one thread, run folders that are emptied, data sets made up on the spot."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from start_cases import SMALL, weights
from torch import Tensor

from flatrock.core.rng import Seed
from flatrock.data.catalog import info
from flatrock.data.dataset import Dataset
from flatrock.engine.loop import train
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.schema import Recipe
from flatrock.recipes.train import train_recipe


@pytest.fixture
def run_folder(tmp_path: Path) -> Iterator[Path]:
    """A run of a large network leaves hundreds of megabytes, which pytest would keep for three sessions."""
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.fixture
def made_up_data(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Noise images of the right shape instead of files, at least two per class; the list records (name, split)."""
    calls: list[tuple[str, str]] = []

    def load_data(name: str, split: str, **options: Any) -> Dataset:
        calls.append((name, split))
        source = info(name)
        assert source.num_classes and source.input_shape
        n = max(64, 2 * source.num_classes)
        seed = Seed(0).child("made up", name, split)
        x = torch.randint(0, 256, (n, *source.input_shape), generator=seed.generator(), dtype=torch.uint8)
        return Dataset(name, x, torch.arange(n) % source.num_classes, source.num_classes)

    for module in ("build", "probe"):
        monkeypatch.setattr(f"flatrock.recipes.{module}.load_data", load_data)
    return calls


@pytest.fixture
def named_runs(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """The overrides that give a recipe the runs it names (HAT's helper, weights to begin with), two small steps each.

    A helper may be a smaller network.

    The last epoch's weights: after two steps one class for all is no wonder, and such an epoch is never the best.
    """

    def make(recipe: Recipe, *, helper: dict[str, Any], **small: Any) -> dict[str, Any]:
        named = {"objective.helper": recipe.objective.options.get("helper"), "model.weights": recipe.model.weights}
        kept = {k: v for k, v in small.items() if not k.startswith("attack")}
        found = {}
        for key, run in named.items():
            if run is not None:
                keys = {**kept, **(helper if key == "objective.helper" else {})}
                done = train(build_job(load_recipe(Path(run).name, keys), folder=tmp_path / key))
                found[key] = str(done.folder / "last.safetensors")
        return found

    yield make
    for key in ("objective.helper", "model.weights"):  # as large as a run_folder
        shutil.rmtree(tmp_path / key, ignore_errors=True)


@pytest.fixture(scope="session")
def averaged_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits trained without attacks, with averaged weights; to be copied, not written to."""
    folder = tmp_path_factory.mktemp("averages") / "digits_standard"
    keys = {**SMALL, "data.limit": 800, "train.epochs": 4, "flatness": [{"name": "swa", "decay": 0.8}]}
    return train_recipe("digits_standard", folder=folder, device="cpu", **keys).folder


@pytest.fixture(scope="session")
def averaged(averaged_run: Path) -> dict[str, Tensor]:
    """The weights of it that are meant."""
    return weights(averaged_run / "average-best.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few epochs of AT on digits; epochs 1, 2 and 3 are kept."""
    return _tiny(tmp_path_factory.mktemp("landscapes"), epochs=3)


@pytest.fixture(scope="session")
def two_epochs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of AT on digits, both kept; to be copied, not written to."""
    return _tiny(tmp_path_factory.mktemp("curvatures"), epochs=2, attack="pgd-2")


def _tiny(folder: Path, *, epochs: int, **select: Any) -> Path:
    """A run of AT on some of the digits that keeps all its epochs."""
    run = train_recipe(
        "digits_at",
        folder=folder / "tiny",
        device="cpu",
        data={"limit": 512},
        train={"epochs": epochs, "batch_size": 64, "keep": {"every": 1}},
        attack={"steps": 2},
        select={"size": 40, **select},
    )
    return run.folder
