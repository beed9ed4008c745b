"""flatrock: robust image classifiers in flat minima, measured honestly and fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatrock.attacks.catalog import attack
from flatrock.core.provenance import VERSION as __version__
from flatrock.core.records import Result, Run
from flatrock.core.threat import L2, Linf
from flatrock.evaluation.evaluate import evaluate
from flatrock.models.catalog import create_model

if TYPE_CHECKING:
    from flatrock.models.classifier import Classifier

__all__ = ["L2", "Linf", "Result", "Run", "__version__", "attack", "create_model", "evaluate", "load", "train"]


def train(recipe: str | Path, **overrides: Any) -> Run:
    """Train a recipe (a library name or a YAML file) and return the run.

    Overrides are recipe keys: `train={"epochs": 3}`, `train__epochs=3` or `**{"train.epochs": 3}`. The keywords folder,
    data_dir, download, device, resume, overwrite and progress steer the run itself; see `flatrock.recipes.train`.
    """
    from flatrock.recipes.train import train_recipe  # here, so that importing flatrock needs torch and numpy alone

    return train_recipe(recipe, **overrides)


def load(source: str | Path | Run, *, which: str = "auto", device: str = "cpu") -> Classifier:
    """The trained model of a run folder or of a checkpoint file, in eval mode.

    `which` is best, last, average-best or average-last; auto = the best epoch, averaged if the recipe averages.
    """
    from flatrock.recipes.restore import load as restore

    return restore(source, which=which, device=device)
