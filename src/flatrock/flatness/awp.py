"""Adversarial weight perturbation (Wu et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.hooks import Nudge, Scene, Shift
from flatrock.core.layout import laid_out
from flatrock.core.options import count, weight
from flatrock.flatness.mover import Mover
from flatrock.flatness.tensors import chosen

# Smallest norm a gradient is divided by: a layer without gradient gets no shift instead of NaN.
TINY = 1e-20


@dataclass(frozen=True, kw_only=True)
class AWP(Mover):
    """min_w max_v L(w + v), ||v_l|| <= gamma ||w_l|| for every layer l.

    The shift climbs the objective, v_l <- v_l + step_size * ||w_l|| g_l / ||g_l||, projected on the constraint: `steps`
    times (K2) in each of `alternations` rounds (A); from the second round on the inputs are attacked anew at w + v.
    One step in one round, the default, gives v_l = gamma ||w_l|| g_l / ||g_l||. It acts from epoch `warmup` on (epochs
    counted from 1). `step: inside` (paper and code) lets the optimizer step at w + v, decay and momentum included, and
    takes v off again; `after` takes v off first.
    """

    gamma: float = 5e-3
    steps: int = 1
    alternations: int = 1
    step_size: float | None = None
    warmup: int = 0
    tensors: str = "weights"
    step: str = "inside"

    def __post_init__(self) -> None:
        weight("awp", "gamma", self.gamma)
        count("awp", "steps", self.steps, least=1)
        count("awp", "alternations", self.alternations, least=1)
        count("awp", "warmup", self.warmup, least=0)
        self.check_options("awp")
        if self.step_size is not None:
            weight("awp", "step_size", self.step_size)
            if self.step_size == 0 < self.gamma:
                raise ConfigError("awp step_size must be > 0, got 0; leave it out for gamma / (alternations * steps)")

    def before_loss(self, scene: Scene) -> Nudge | None:
        """Climb to the worst weights nearby; costs `steps` * `alternations` forward-backwards of the objective."""
        if self.gamma == 0 or scene.moment.epoch < self.warmup:
            return None
        moved = chosen(scene.model, self.tensors)
        step_size = self.gamma / (self.alternations * self.steps) if self.step_size is None else self.step_size
        shift: Shift = {}
        points = scene.points
        for turn in range(self.alternations):
            if turn > 0:
                points = scene.craft(shift)
            for _ in range(self.steps):
                gradients = scene.gradients(shift, points)
                shift = climb(moved, shift, gradients, step_size=step_size, gamma=self.gamma)
        return Nudge(shift, points, step_inside=self.steps_inside)

    def passes(self, objective: int, attack: int) -> int:
        """The ascent passes, and the attacks of further rounds."""
        if self.gamma == 0:
            return 0
        return self.alternations * self.steps * objective + (self.alternations - 1) * attack


@torch.no_grad()
def climb(
    weights: Mapping[str, Tensor], shift: Shift, gradients: Mapping[str, Tensor], *, step_size: float, gamma: float
) -> Shift:
    """v_l <- P(v_l + step_size * ||w_l|| g_l / ||g_l||), P the projection on ||v_l|| <= gamma ||w_l||."""
    names = [n for n in weights if n in gradients]
    if not names:
        return shift
    # All layers' numbers in one vector each: a step must not launch a kernel per number.
    sizes = torch.stack(torch._foreach_norm([weights[n] for n in names]))
    slopes = torch.stack(torch._foreach_norm([gradients[n] for n in names]))
    factors, limits = step_size * sizes / (slopes + TINY), gamma * sizes
    # In the layout of the weights: tensors laid out alike are added all at once.
    ascents = list(torch._foreach_mul([laid_out(gradients[n], weights[n]) for n in names], list(factors.unbind())))
    if not shift and step_size <= gamma:
        return dict(zip(names, ascents, strict=True))  # within the constraint by construction
    moved: dict[str, Tensor] = {}
    for name, ascent, limit in zip(names, ascents, limits.unbind(), strict=True):
        v = shift[name] + ascent if name in shift else ascent
        moved[name] = v * (limit / (torch.linalg.vector_norm(v) + TINY)).clamp(max=1)
    return {**shift, **moved}
