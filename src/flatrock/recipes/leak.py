"""Held-out samples that a run, or the weights it begins with, are trained on: no epoch may be chosen on those.

And test samples that are: their accuracy is none of a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from flatrock.core.errors import DataError, StateError
from flatrock.data.catalog import found, info, load_data
from flatrock.data.dataset import Dataset
from flatrock.data.overlap import shared_samples
from flatrock.data.pictures import Form, Pictures
from flatrock.data.split import Split, fair_subset, held_out_split
from flatrock.engine.folder import RunFolder
from flatrock.recipes.schema import Data, Recipe

# What a run's weights were trained on, as provenance keeps it: run, data, options, held_out, limit and, where run.json
# tells them, the digests of the samples it held out and of the whole training set.
Seen = Mapping[str, Any]


def seen_by(path: Path, recipe: Recipe, recipe_hash: str) -> list[dict[str, Any]]:
    """What the weights of a checkpoint were trained on: its run, then the runs that one began with, if recorded."""
    data = recipe.data
    own: dict[str, Any] = {"run": path.absolute().parent.name, "data": data.name, "options": data.options}
    own |= {"held_out": data.held_out, "limit": data.limit}
    try:
        info = RunFolder(path.parent).read_info()
    except StateError:  # a checkpoint that was put elsewhere
        return [own]
    if info["recipe_hash"] != recipe_hash:
        return [own]
    told = info.get("provenance", {})
    own |= {"digest": told.get("held_out"), "training_set": told.get("training_set")}
    return [own, *told.get("start", {}).get("seen", [])]


def leak(recipe: Recipe, data: Dataset, split: Split, seen: Sequence[Seen]) -> str | None:
    """What is wrong with choosing the best epoch on held-out samples, if weights were trained on some; else None.

    `data` is the whole training set. Data that are not known to be the same are taken for others.
    """
    if recipe.select.data == "test":
        return None
    chosen = fair_subset(split.held_out, recipe.select.size)
    same = [(one, trained) for one in seen if (trained := _trained(one, recipe.data, data)) is not None]
    asked = set(chosen.ids.tolist())
    counts = [(len(asked & set(trained.ids.tolist())), one) for one, trained in same]
    count, worst = max(counts, key=lambda found: found[0], default=(0, {}))
    if not count:
        return None
    # Fewer held-out samples are always some of more (held_out_split): the fewest of all runs were trained on by none.
    least = min(int(one["held_out"]) for one, _ in same)
    cure = f"say data.held_out={least}, or less" if least else "say select=test, which marks every number"
    limit = "" if worst["limit"] is None else f", data.limit={worst['limit']}"
    return (
        f"run {worst['run']} (data.held_out={worst['held_out']}{limit}) was trained on {count} of the {len(chosen)} "
        f"held-out samples that the best epoch would be chosen on, which are no test of its weights; {cure}, or begin "
        "with weights that were not"
    )


def extra_leak(recipe: Recipe, extra: Dataset, held_out: Dataset) -> str | None:
    """What is wrong with choosing the best epoch on held-out samples that are among the extra images; else None."""
    if recipe.data.extra is None or recipe.select.data == "test":
        return None
    chosen = fair_subset(held_out, recipe.select.size)
    count = shared_samples(chosen, extra)
    if not count:
        return None
    return (
        f"data.extra.file: {count} of the {len(chosen)} held-out samples that the best epoch would be chosen on are "
        f"among the images of {recipe.data.extra.file}, which are trained on; leave them out there"
    )


def leak_known(recipe: Recipe, seen: Sequence[Seen], folder: Path | None) -> str | None:
    """The same before training, where the data lie in the folder; None if they do not."""
    if recipe.data.held_out == 0 or not seen or found(recipe.data.name, folder) is None:
        return None
    data = load_data(recipe.data.name, "train", folder=folder, **recipe.data.options)
    return leak(recipe, data, held_out_split(data, size=recipe.data.held_out), seen)


def tested_on(recipe: Recipe, test: Dataset, folder: Path | None) -> int:
    """How many of these test samples are in the training set, too.

    Asked of the user's own data, where files or a function decide. 0 if images stay in their files: reading all of them
    would take as long as an epoch. DataError if the training set is not there.
    """
    if info(recipe.data.name).train_size is not None or isinstance(test.x, Pictures):
        return 0
    data = load_data(recipe.data.name, "train", folder=folder, **recipe.data.options)
    return 0 if isinstance(data.x, Pictures) else shared_samples(test, data)


def _trained(one: Seen, here: Data, data: Dataset) -> Dataset | None:
    """The samples of `data` a run was trained on; None if it was trained on others, as far as is known."""
    if one["data"] != here.name or _content(one["options"]) != _content(here.options):
        return None
    try:
        split = held_out_split(data, size=one["held_out"]) if one["held_out"] else Split(data, data, "none")
    except DataError:  # there are too few here
        return None
    if info(here.name).train_size is None and not _same_files(one, data, split):
        return None
    if (one.get("digest") or split.digest) != split.digest:
        return None
    return fair_subset(split.train, one["limit"])


def _same_files(one: Seen, data: Dataset, split: Split) -> bool:
    """Whether data in files of the user's, or of a function's making, are those a run was trained on, if it is known.

    By the content of the training set, or of runs that did not note it by who was held out, which labels decide, too.
    """
    if whole := one.get("training_set"):
        return bool(whole == data.fingerprint()[: len(whole)])
    return bool(one["held_out"]) and one.get("digest") == split.digest


def _content(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that make other samples; the same images in another size are the same samples."""
    return {key: value for key, value in options.items() if key not in {field.name for field in fields(Form)}}
