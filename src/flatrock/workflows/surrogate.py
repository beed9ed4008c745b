"""A run as the surrogate of another evaluation: its network, and what provenance says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from flatrock.attacks.catalog import Spec
from flatrock.core.errors import FlatrockError
from flatrock.core.progress import Progress, Silent
from flatrock.core.tensorfile import weights_digest
from flatrock.data.dataset import Dataset
from flatrock.evaluation.plans import make_plan, with_transfer
from flatrock.recipes.pieces import build_model
from flatrock.recipes.restore import Source, check_beside, facts, open_checkpoint, restored
from flatrock.recipes.schema import Recipe
from flatrock.recipes.source import how_to_train


@dataclass(frozen=True)
class Surrogate:
    """The network transfers craft on, or none; `about` goes to provenance."""

    model: nn.Module | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def attacks(self, chosen: Sequence[Spec], like: Sequence[Spec]) -> Sequence[Spec]:
        """The attacks chosen and those on the surrogate, whose step size is that of `like` if it gives one."""
        return chosen if self.model is None else with_transfer(chosen, like=like)

    def names(self, chosen: Sequence[Spec]) -> list[str]:
        """What a result calls these attacks: a plan by its own name."""
        return sorted({step.plan or step.label for step in make_plan(chosen, surrogate=self.model)})

    @property
    def provenance(self) -> dict[str, Any]:
        """What to add to the provenance of a result."""
        return {} if self.model is None else {"surrogate": self.about}


def open_surrogate(source: Source | None, data: Dataset, progress: Progress | None = None) -> Surrogate:
    """The network of a run folder (its best epoch) or checkpoint file, if it takes these data; none for None."""
    if source is None:
        return Surrogate()
    path, tensors, meta = open_checkpoint(source)
    model, recipe = restored(path, tensors, meta, progress)
    check_beside(model, meta["class_names"], data, data.class_names, what=f"surrogate {path}")
    return Surrogate(model, {**facts(path, recipe, meta), "seed": recipe.seed, "weights": weights_digest(model)})


def surrogate_fault(recipe: Recipe, key: str, place: Path) -> str | None:
    """What keeps a recipe from the run that `key` names, in words; None if nothing does, as far as is known now."""
    if not place.exists():
        cure = how_to_train(place, "name a run on the same data")
        return f"{key}: there is no run folder or checkpoint {place}; {cure}"
    try:
        path, tensors, meta = open_checkpoint(place)
        model = restored(path, tensors, meta, Silent())[0]
        check_beside(model, meta["class_names"], build_model(recipe), None, what=str(path))
    except FlatrockError as error:
        return f"{key}: {error}"
    return None


def surrogate_mark(about: Mapping[str, Any]) -> str:
    """What tells the file of a result with this provenance from those with other surrogates."""
    return f"-from-{about['surrogate']['weights'][:8]}" if "surrogate" in about else ""


def unheeded(data: Dataset) -> None:
    """For an evaluation nobody wants to see the data of."""
