"""Sharpness-aware minimization (Foret et al. 2021): AWP's neighbour, one ball for all weights together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flatrock.core.hooks import Nudge, Scene, Shift
from flatrock.core.options import weight
from flatrock.flatness.mover import Mover
from flatrock.flatness.tensors import chosen


@dataclass(frozen=True, kw_only=True)
class SAM(Mover):
    """min_w max_{||v|| <= rho} L(w + v), v = rho g / ||g|| with one norm over all tensors.

    The gradient at w + v is applied at w (`step: after`, as published); `inside` steps at w + v as AWP does.
    """

    rho: float = 0.05
    tensors: str = "all"
    step: str = "after"

    def __post_init__(self) -> None:
        weight("sam", "rho", self.rho)
        self.check_options("sam")

    def before_loss(self, scene: Scene) -> Nudge | None:
        """One step of length rho up the objective; costs one forward-backward of it."""
        if self.rho == 0:
            return None
        gradients = scene.gradients({}, scene.points)
        wanted = chosen(scene.model, self.tensors)
        shift = ascent({n: g for n, g in gradients.items() if n in wanted}, rho=self.rho)
        return Nudge(shift, scene.points, step_inside=self.steps_inside)

    def passes(self, objective: int, attack: int) -> int:
        """One more forward of the objective."""
        return objective if self.rho else 0


@torch.no_grad()
def ascent(gradients: Mapping[str, Tensor], *, rho: float) -> Shift:
    """v = rho g / ||g||; nothing where the whole gradient is zero."""
    if not gradients:
        return {}
    length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients.values()))))
    return {n: g * (rho / length.clamp_min(1e-20)) for n, g in gradients.items()}
