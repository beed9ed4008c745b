"""What a recipe decides by itself: its hash, its network, its rates, its attack, and where its run lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatrock.attacks.catalog import ATTACKS
from flatrock.core.files import json_text, sha256
from flatrock.core.guests import is_own
from flatrock.core.team import ALONE, Team
from flatrock.core.types import Attack
from flatrock.data.catalog import data_options, info
from flatrock.data.pictures import Form
from flatrock.engine.parts import part_sizes
from flatrock.engine.schedule import SCHEDULES, Schedule
from flatrock.models.catalog import MODELS, create_model
from flatrock.models.classifier import Classifier
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.recipes.schema import Data, Network, Recipe

DEFAULT_RUNS = Path("runs")


def recipe_hash(recipe: Recipe) -> str:
    """Identifies the keys that decide the weights."""
    return sha256(json_text(recipe.training_keys()))[:16]


def rows_at_once(recipe: Recipe, team: Team = ALONE, *, samples: int | None = None) -> int:
    """How many rows go through the network of a process at once: of a full batch, or of all samples if they are few."""
    size = recipe.train.batch_size if samples is None else min(recipe.train.batch_size, samples)
    return max(part_sizes(team.rows(size), recipe.train.micro_batch))


def data_shape(data: Data) -> tuple[int, ...] | None:
    """Shape of one input; None of one's own data that are not made one size, so that only they know."""
    known = info(data.name).input_shape
    if known is not None or "size" not in data_options(data.name):
        return known
    form = Form(**data.options)
    return None if form.size is None else (form.channels, form.size, form.size)


def model_options(network: Network, input_shape: tuple[int, ...] | None) -> dict[str, Any]:
    """Options of the network; one for inputs of any size takes those the data have, unless told otherwise."""
    given = {"input_shape": list(input_shape)} if input_shape and takes_any_shape(network.name) else {}
    return given | network.options


def takes_any_shape(name: str) -> bool:
    """Whether a network has to be told the shape of its inputs: the user's own, and transformers."""
    return is_own(name) or (name in MODELS and "input_shape" in MODELS.entry(name).options())


def build_model(recipe: Recipe) -> Classifier:
    """The recipe's network with its initial weights."""
    return create_model(
        recipe.model.name,
        num_classes=recipe.model.num_classes or 10,
        normalize=recipe.model.normalize,
        seed=recipe.seed,
        **recipe.model.options,
    )


def build_schedule(recipe: Recipe) -> Schedule:
    """The learning rate over time."""
    options = {"lr": recipe.optimizer.lr, "epochs": recipe.train.epochs, **recipe.schedule.options}
    return SCHEDULES.make(recipe.schedule.name, **options)


def build_attack(recipe: Recipe) -> Attack | None:
    """The attack the recipe trains with, if there is one.

    GAT has one weight, in its loss and in its attack: what the attack does not say of it is the objective's. It is not
    written into the recipe, where one of the two could be changed without the other.
    """
    if recipe.attack.name == "none":
        return None
    options = recipe.attack.options
    if recipe.attack.name == "guided" and recipe.objective.name == "gat":
        objective = OBJECTIVES.make("gat", **recipe.objective.options)
        options = {key: getattr(objective, key) for key in ("weight", "rise", "rise_after")} | options
    return ATTACKS.make(recipe.attack.name, **options)
