"""Which samples of a recipe's data are meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatrock.core.errors import ConfigError, DataError
from flatrock.core.options import choose
from flatrock.data.catalog import info, load_data
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset, held_out_split
from flatrock.recipes.schema import Recipe

PARTS = ("train", "held_out", "test")


def data_part(
    recipe: Recipe, on: str, folder: Path | None = None, *, training_set: str | None = None, run: object = "it"
) -> Dataset:
    """The samples the run was trained on, those it set aside, or its test set.

    `training_set` is the digest of the whole training set the `run` had: samples of another one are a DataError.
    """
    choose("data", "part", on, PARTS)
    if on == "test":
        return load_data(recipe.data.name, "test", folder=folder, **recipe.data.options)
    data = load_data(recipe.data.name, "train", folder=folder, **recipe.data.options)
    _check_training_set(data, on, training_set, run)
    if not recipe.data.held_out:
        if on == "held_out":
            raise ConfigError(f"recipe {recipe.name!r} sets no samples aside (data.held_out); look at train or test")
        return fair_subset(data, recipe.data.limit)
    split = held_out_split(data, size=recipe.data.held_out)
    return split.held_out if on == "held_out" else fair_subset(split.train, recipe.data.limit)


def _check_training_set(data: Dataset, on: str, known: str | None, run: object) -> None:
    """DataError if these are not the samples that a run was trained on, or set aside, but others of the same name."""
    source = info(data.name)
    # What is computed, or decoded from pictures that everybody has, may differ in its last bits on another machine.
    exact = bool(source.remote) or data.name in ("npz", "folder")
    if known and exact and (here := data.fingerprint()[: len(known)]) != known:
        raise DataError(
            f"{data.name} training set {here} is not the one {run} was trained on ({known}), and {on} samples are of "
            "that one; give the data it was trained on (--data-dir), or look at test samples (--on test)"
        )


def check_classes(data: Dataset, meta: Mapping[str, Any]) -> None:
    """DataError if a checkpoint was trained to tell other classes apart, or in another order."""
    if list(data.class_names) != meta["class_names"]:
        raise DataError(
            f"the data have classes {list(data.class_names)}, the model has {meta['class_names']}; "
            "give the data it was trained on (--data-dir)"
        )
