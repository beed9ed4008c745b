"""What a recipe decides by itself: its hash, its network, and where its run lies."""

from __future__ import annotations

from pathlib import Path

from flatrock.core.files import json_text, sha256
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.recipes.schema import Recipe

DEFAULT_RUNS = Path("runs")


def recipe_hash(recipe: Recipe) -> str:
    """Identifies the keys that decide the weights."""
    return sha256(json_text(recipe.training_keys()))[:16]


def build_model(recipe: Recipe) -> Classifier:
    """The recipe's network with its initial weights."""
    return create_model(
        recipe.model.name,
        num_classes=recipe.model.num_classes or 10,
        normalize=recipe.model.normalize,
        seed=recipe.seed,
        **recipe.model.options,
    )
