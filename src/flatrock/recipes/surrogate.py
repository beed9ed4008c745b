"""A run as the surrogate of another evaluation: its network, and what provenance says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flatrock.attacks.catalog import Spec
from flatrock.core.progress import Progress
from flatrock.core.tensorfile import weights_digest
from flatrock.data.dataset import Dataset
from flatrock.evaluation.plans import make_plan, with_transfer
from flatrock.recipes.restore import Source, check_beside, facts, open_checkpoint, restored


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
    return Surrogate(model, {**facts(path, recipe, meta), "weights": weights_digest(model)})


def surrogate_mark(about: Mapping[str, Any]) -> str:
    """What tells the file of a result with this provenance from those with other surrogates."""
    return f"-from-{about['surrogate']['weights'][:8]}" if "surrogate" in about else ""


def unheeded(data: Dataset) -> None:
    """For an evaluation nobody wants to see the data of."""
