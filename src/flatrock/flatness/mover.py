"""What methods that move the weights the loss sees have in common."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from flatrock.core.hooks import Flatness
from flatrock.core.options import choose
from flatrock.flatness.tensors import TENSORS, chosen


class Mover(Flatness):
    """A method with the options `tensors` (which ones move) and `step` (where the optimizer steps)."""

    tensors: str
    step: str
    moves_weights: ClassVar[bool] = True

    @property
    def steps_inside(self) -> bool:
        """As the option says."""
        return self.step == "inside"

    def check_options(self, owner: str) -> None:
        """Both options are among their choices."""
        choose(owner, "tensors", self.tensors, TENSORS)
        choose(owner, "step", self.step, ("inside", "after"))

    def check(self, model: nn.Module) -> None:
        """There are such tensors."""
        chosen(model, self.tensors)
