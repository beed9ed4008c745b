"""What the tests of recipes that begin with given weights share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.progress import Silent
from flatrock.core.tensorfile import load
from flatrock.recipes.load import load_recipe
from flatrock.recipes.schema import Recipe

SMALL = {"data.limit": 256, "train.batch_size": 64, "train.tensorboard": False, "select.size": 40}
FEW = {**SMALL, "train.epochs": 2, "attack.steps": 1, "select.attack": "pgd-1"}


class Told(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def weights(file: Path) -> dict[str, Tensor]:
    """Those of a checkpoint."""
    tensors, _ = load(file)
    return {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def at(start: Path | str | None, **changes: Any) -> Recipe:
    """A little AT on digits that begins with these weights."""
    return load_recipe("digits_at", {**FEW, "model.weights": None if start is None else str(start), **changes})
