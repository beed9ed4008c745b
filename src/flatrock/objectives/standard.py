"""Training without an attack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flatrock.core.options import share
from flatrock.core.types import Parts, Views
from flatrock.objectives.terms import cross_entropy, need


@dataclass(frozen=True, kw_only=True)
class Standard:
    """CE(z(x), y). `label_smoothing`: see `terms.cross_entropy`."""

    label_smoothing: float = 0.0
    passes: ClassVar[tuple[str, ...]] = ("clean",)
    inner_loss: ClassVar[str] = "none"
    hard_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        share("standard", "label_smoothing", self.label_smoothing, less=True)

    def loss(self, views: Views, y: Tensor) -> Parts:
        """Cross-entropy on clean inputs."""
        ce = cross_entropy(need(views.clean).logits, y, smoothing=self.label_smoothing)
        return Parts({"ce": ce}, {"ce": 1.0})
