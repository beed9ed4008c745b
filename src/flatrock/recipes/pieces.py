"""What a recipe decides by itself: its hash, its network, and where its run lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatrock.core.files import json_text, sha256
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.models.factory import is_own
from flatrock.recipes.schema import Network, Recipe

DEFAULT_RUNS = Path("runs")


def recipe_hash(recipe: Recipe) -> str:
    """Identifies the keys that decide the weights."""
    return sha256(json_text(recipe.training_keys()))[:16]


def model_options(network: Network, input_shape: tuple[int, ...] | None) -> dict[str, Any]:
    """Options of the network; one of the user's own takes the inputs the data have, unless told otherwise."""
    own = is_own(network.name) and input_shape is not None
    return ({"input_shape": list(input_shape or ())} if own else {}) | dict(network.options)


def build_model(recipe: Recipe) -> Classifier:
    """The recipe's network with its initial weights."""
    return create_model(
        recipe.model.name,
        num_classes=recipe.model.num_classes or 10,
        normalize=recipe.model.normalize,
        seed=recipe.seed,
        **recipe.model.options,
    )
