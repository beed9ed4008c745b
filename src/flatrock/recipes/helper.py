"""A run as HAT's helper: its network, whether it fits, and what provenance says about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatrock.core.errors import FlatrockError, StateError
from flatrock.core.types import Objective
from flatrock.engine.helper import Helper
from flatrock.models.classifier import Classifier
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.objectives.hat import HAT
from flatrock.recipes.pieces import build_model
from flatrock.recipes.restore import check_beside
from flatrock.recipes.schema import Recipe
from flatrock.recipes.source import how_to_train, open_run


def open_helper(
    objective: Objective, model: Classifier, class_names: Sequence[str] | None, *, fast: bool = False
) -> Helper | None:
    """The helper an objective asks for, beside the network to be trained; None if it asks for none.

    It is the best epoch of a run folder, or a checkpoint file. `class_names` None: they are not known yet.
    """
    if not isinstance(objective, HAT) or "helper" not in objective.passes:
        return None
    source = Path(objective.helper)
    if not source.exists():
        cure = how_to_train(source, "train one without attacks (objective: {name: standard}) and name its folder")
        raise StateError(f"objective.helper: there is no run folder or checkpoint {source}; {cure}")
    try:
        run = open_run(source)
    except FlatrockError as error:
        raise type(error)(f"objective.helper: {error}") from error
    check_beside(run.network, run.class_names, model, class_names, what=f"objective.helper: {run.path}")
    where = next(model.parameters()).device
    return Helper(run.network.to(where), reach=objective.reach, fast=fast, about=run.about)


def helper_fault(recipe: Recipe) -> str | None:
    """What keeps a recipe from its helper, in words; None if nothing does, as far as is known without the data."""
    try:
        open_helper(OBJECTIVES.make(recipe.objective.name, **recipe.objective.options), build_model(recipe), None)
    except FlatrockError as error:
        return str(error)
    return None
