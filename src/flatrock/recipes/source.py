"""Runs that a recipe names, as the helper of its objective or as what it begins with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatrock.core.errors import ConfigError, StateError
from flatrock.engine.folder import RunFolder
from flatrock.models.classifier import Classifier
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.recipes.load import recipe_names
from flatrock.recipes.pieces import DEFAULT_RUNS
from flatrock.recipes.restore import facts, open_checkpoint, restored
from flatrock.recipes.schema import Network, Recipe
from flatrock.recipes.sections import Named


@dataclass(frozen=True)
class NamedRun:
    """The network of a run, its recipe, the checkpoint taken and its classes; `about` goes to provenance."""

    network: Classifier
    recipe: Recipe
    path: Path
    class_names: list[str]
    about: dict[str, Any]


def open_run(source: Path) -> NamedRun:
    """The best epoch of a finished run (see open_checkpoint), or a checkpoint file; not chosen on the test set."""
    if source.is_dir() and not RunFolder(source).info.is_file():
        raise StateError(f"{source} is no run folder, it has no run.json; name a run, one of its checkpoints or a file")
    if source.is_dir():
        RunFolder(source).check_ended(cure=", or name one of its checkpoints")
    path, tensors, meta = open_checkpoint(source)
    network, recipe = restored(path, tensors, meta)
    if network.marks:
        raise ConfigError(
            f"the epoch of {path} was chosen on the test set, and so would be every number that "
            "follows; name a run that held images out for that, or the last epoch of this one"
        )
    about = {**facts(path, recipe, meta), "seed": recipe.seed, "objective": recipe.objective.name}
    about["run"] = path.absolute().parent.name
    return NamedRun(network, recipe, path, meta["class_names"], about)


def sources(recipe: Recipe) -> dict[str, Path]:
    """What a recipe is built on, by the key that names it: runs, or files."""
    found: dict[str, Path] = {}
    if "helper" in OBJECTIVES.make(recipe.objective.name, **recipe.objective.options).passes:
        found["objective.helper"] = Path(str(recipe.objective.options["helper"]))
    if recipe.model.weights is not None:
        found["model.weights"] = Path(recipe.model.weights)
    return found


def built_on(recipe: Recipe, key: str, place: Path) -> Recipe:
    """The recipe with another place of what `key` names."""
    section, _, name = key.partition(".")
    old: Named | Network = getattr(recipe, section)
    return recipe.model_copy(update={section: type(old).model_validate({**old.model_dump(), name: str(place)})})


def how_to_train(source: Path, otherwise: str) -> str:
    """The command that trains a run that is not there; `otherwise` if no recipe is called like it."""
    if source.name not in recipe_names():
        return otherwise
    elsewhere = "" if source == DEFAULT_RUNS / source.name else f" --run-dir {source}"
    return f"train it first: flatrock train {source.name}{elsewhere}"
