"""A run as HAT's helper: its network, whether it fits, and what provenance says about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatrock.core.errors import ConfigError, FlatrockError, StateError
from flatrock.core.types import Objective
from flatrock.engine.folder import RunFolder
from flatrock.engine.helper import Helper
from flatrock.models.classifier import Classifier
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.objectives.hat import HAT
from flatrock.recipes.load import recipe_names
from flatrock.recipes.pieces import DEFAULT_RUNS, build_model
from flatrock.recipes.restore import check_beside, facts, open_checkpoint, restored
from flatrock.recipes.schema import Recipe


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
        raise StateError(f"objective.helper: there is no run folder or checkpoint {source}; {_cure(source)}")
    try:
        if source.is_dir() and RunFolder(source).read_info()["status"] == "running":
            raise StateError(f"run {source} is not finished; train on with --resume, or name one of its checkpoints")
        path, tensors, meta = open_checkpoint(source)
        network, recipe = restored(path, tensors, meta)
    except FlatrockError as error:
        raise type(error)(f"objective.helper: {error}") from error
    if network.marks:
        raise ConfigError(
            f"objective.helper: the epoch of {path} was chosen on the test set, and so would be every number that "
            "follows; name a run that held images out for that"
        )
    check_beside(network, meta["class_names"], model, class_names, what=f"objective.helper: {path}")
    about = {**facts(path, recipe, meta), "run": path.absolute().parent.name, "objective": recipe.objective.name}
    return Helper(network.to(next(model.parameters()).device), reach=objective.reach, fast=fast, about=about)


def helper_fault(recipe: Recipe) -> str | None:
    """What keeps a recipe from its helper, in words; None if nothing does, as far as is known without the data."""
    try:
        open_helper(OBJECTIVES.make(recipe.objective.name, **recipe.objective.options), build_model(recipe), None)
    except FlatrockError as error:
        return str(error)
    return None


def _cure(source: Path) -> str:
    """The command that trains the run that is not there."""
    if source.name in recipe_names():
        elsewhere = "" if source == DEFAULT_RUNS / source.name else f" --run-dir {source}"
        return f"train it first: flatrock train {source.name}{elsewhere}"
    return "train one without attacks (objective: {name: standard}) and name its folder"
