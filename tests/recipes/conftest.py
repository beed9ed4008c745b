"""Shared by the recipe tests: data sets made up on the spot, and the runs that recipes name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatrock.core.rng import Seed
from flatrock.data.catalog import info
from flatrock.data.dataset import Dataset
from flatrock.engine.loop import train
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.schema import Recipe


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
