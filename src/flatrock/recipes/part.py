"""Which samples of a recipe's data are meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatrock.core.errors import ConfigError, DataError
from flatrock.core.options import choose
from flatrock.data.catalog import load_data
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset, held_out_split
from flatrock.recipes.schema import Recipe

PARTS = ("train", "held_out", "test")


def data_part(recipe: Recipe, on: str, folder: Path | None = None) -> Dataset:
    """The samples the run was trained on, those it set aside, or its test set."""
    choose("data", "part", on, PARTS)
    if on == "test":
        return load_data(recipe.data.name, "test", folder=folder, **recipe.data.options)
    data = load_data(recipe.data.name, "train", folder=folder, **recipe.data.options)
    if not recipe.data.held_out:
        if on == "held_out":
            raise ConfigError(f"recipe {recipe.name!r} sets no samples aside (data.held_out); look at train or test")
        return fair_subset(data, recipe.data.limit)
    split = held_out_split(data, size=recipe.data.held_out)
    return split.held_out if on == "held_out" else fair_subset(split.train, recipe.data.limit)


def check_classes(data: Dataset, meta: Mapping[str, Any]) -> None:
    """DataError if a checkpoint was trained to tell other classes apart, or in another order."""
    if list(data.class_names) != meta["class_names"]:
        raise DataError(
            f"the data have classes {list(data.class_names)}, the model has {meta['class_names']}; "
            "give the data it was trained on (--data-dir)"
        )
