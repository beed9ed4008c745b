"""Training without an attack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flatrock.core.types import Parts, Views
from flatrock.objectives.terms import cross_entropy, need


@dataclass(frozen=True, kw_only=True)
class Standard:
    """CE(z(x), y)."""

    passes: ClassVar[tuple[str, ...]] = ("clean",)
    inner_loss: ClassVar[str] = "none"
    hard_labels: ClassVar[bool] = False

    def loss(self, views: Views, y: Tensor) -> Parts:
        """Cross-entropy on clean inputs."""
        return Parts({"ce": cross_entropy(need(views.clean).logits, y)}, {"ce": 1.0})
