"""Label smoothing in recipes: what the hash knows of it, and faults that are told with all others."""

from __future__ import annotations

from typing import Any

import pytest

from flatrock.core.errors import ConfigError
from flatrock.recipes.load import load_recipe, recipe_names
from flatrock.recipes.pieces import recipe_hash

NAMED = ("digits_standard", "cifar10_short_at", "cifar10_short_hat", "cifar10_short_gat", "digits_mart", "digits_alp")


@pytest.mark.parametrize("name", NAMED)
def test_zero_is_the_recipe_without(name: str) -> None:
    assert recipe_hash(load_recipe(name, {"objective.label_smoothing": 0})) == recipe_hash(load_recipe(name))
    assert recipe_hash(load_recipe(name, {"objective.label_smoothing": 0.0})) == recipe_hash(load_recipe(name))


@pytest.mark.parametrize("name", [n for n in NAMED if "mart" not in n])
def test_another_value_is_another_training(name: str) -> None:
    recipe = load_recipe(name, ["objective.label_smoothing=1/10"])
    assert recipe.objective.options["label_smoothing"] == 0.1
    assert recipe_hash(recipe) != recipe_hash(load_recipe(name))


def test_recipes_of_the_library_say_nothing_of_it() -> None:
    """Their resolved form, which runs and their checkpoints hold, is what it was; generated images have it."""
    named = [n for n in recipe_names() if "label_smoothing" in str(load_recipe(n).resolved())]
    assert [n for n in named if "_ddpm_" not in n] == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("digits_at", 1, "objective: at label_smoothing must lie in [0, 1), got 1; write a tenth as 0.1"),
        ("digits_trades", 10, "objective: trades label_smoothing must lie in [0, 1), got 10; write a tenth as 0.1"),
        ("digits_alp", -0.1, "objective: alp label_smoothing must be a number >= 0, got -0.1"),
        ("digits_mart", 0.1, "objective: mart label_smoothing must be 0, got 0.1: "),
    ],
)
def test_faults_come_with_all_others(name: str, value: Any, message: str) -> None:
    changes = {"objective.label_smoothing": value, "train.epochs": 0, "seed": -1}
    with pytest.raises(ConfigError, match="has 3 faults") as caught:
        load_recipe(name, changes)
    assert sum(fault.startswith(message) for fault in caught.value.faults) == 1, caught.value.faults


def test_a_misspelt_key_is_told_the_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'label_smoothing'"):
        load_recipe("digits_at", {"objective.label_smothing": 0.1})
