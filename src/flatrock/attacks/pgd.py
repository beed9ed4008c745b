"""Projected gradient ascent inside a threat: the one loop behind FGSM, PGD, CW-PGD and KL-PGD."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from flatrock.core.errors import ModelError
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat
from flatrock.core.types import Model, Replayer, SampleLoss

STARTS = ("uniform", "gaussian", "zero")
# When a step clips to the box: after projecting on the ball (AT), or before (TRADES in L2).
BOXES = ("last", "first")
# A sample leaves the batch early only if it is wrong by more than rounding can undo (relative to its logits).
SAFE_MARGIN = 1e-4
# Logits beyond it that are neither the largest nor the true class's are masks or off the scale: nothing rounds as they.
USUAL = 100.0


@dataclass(frozen=True)
class Aim:
    """What a kernel climbs: loss(model(x), target), row by row; with `noise`, a constant, loss(model(x + noise), .)."""

    model: Model
    loss: SampleLoss
    target: Tensor
    y: Tensor
    noise: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> Self:
        """The same aim for some of the samples."""
        noise = None if self.noise is None else self.noise[rows]
        return replace(self, target=self.target[rows], y=self.y[rows], noise=noise)

    def answer(self, x: Tensor) -> Tensor:
        """The logits at x."""
        return self.model(x if self.noise is None else x + self.noise)

    def at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Loss per sample, and the damage done at x: 0 still right, 1 wrong, 2 safely broken."""
        with torch.no_grad():
            logits = self.answer(x)
            damage = (~classified_right(logits, self.y)).int() + safely_broken(logits, self.y).int()
            return self.loss(logits, self.target), damage

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the summed loss w.r.t. x (row i is sample i's own gradient), and the logits."""
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            logits = self.answer(x)
            grad = slope(self.loss(logits, self.target).sum(), x)
        return grad, logits.detach()


def slope(total: Tensor, x: Tensor, *, again: bool = False) -> Tensor:
    """d total / dx, else ModelError; `again` if the same pass is differentiated once more."""
    grads = torch.autograd.grad(total, x, retain_graph=again, allow_unused=True) if total.requires_grad else (None,)
    if grads[0] is None:
        raise ModelError("the model's output has no gradient w.r.t. its input; gradient attacks need one")
    return grads[0]


def classified_right(logits: Tensor, y: Tensor) -> Tensor:
    """The largest logit is the true class's; an answer that is not finite is no answer."""
    return (logits.argmax(1) == y) & (logits.abs().amax(1) < torch.inf)


def safely_broken(logits: Tensor, y: Tensor) -> Tensor:
    """Misclassified by a margin that batching and rounding cannot undo, or not finite.

    Rounding grows with the logits; but a class that is masked by -1e9 says nothing of the other ones.
    """
    top, own, largest = logits.amax(1), logits.gather(1, y[:, None]).squeeze(1), logits.abs().amax(1)
    size = torch.maximum(torch.maximum(top.abs(), own.abs()), largest.clamp(max=USUAL))
    return (top - own > SAFE_MARGIN * size) | ~(largest < torch.inf)


def start_point(x: Tensor, threat: Threat, gen: SampleGen, *, start: str, noise: float) -> Tensor:
    """First iterate, inside ball and box: 'uniform' in the ball, 'gaussian' noise*N(0, I), or 'zero' (x itself).

    'wide' is U(-0.5, 0.5) at every coordinate, in the box but mostly not in the ball, into which the first step leads.
    """
    if start == "zero":
        return x
    if start == "wide":
        return (x + (gen.uniform(x) - 0.5)).clamp(0, 1)
    delta = threat.sample(x, gen) if start == "uniform" else threat.project(noise * gen.normal(x))
    return (x + delta).clamp(0, 1)


def move(x: Tensor, x_adv: Tensor, step: Tensor, threat: Threat, *, box: str = "last") -> Tensor:
    """Take a step, then project on the ball and clip to the box; `box: first` clips before it projects.

    Clipping moves every coordinate of the perturbation toward 0, so the point stays in the ball; projecting shrinks it
    toward x, so the point stays in the box. In linf both are the same, in l2 the second comes out longer or as long.
    """
    there = x_adv + step
    if box == "first":
        there = there.clamp(0, 1)
    return (x + threat.project(there - x)).clamp(0, 1)


def pgd(
    aim: Aim,
    x: Tensor,
    threat: Threat,
    *,
    steps: int,
    step_size: float,
    start: Tensor,
    box: str = "last",
    early_stop: bool = False,
) -> Tensor:
    """x' <- P(x' + step_size * ascent(grad loss(x'))), `steps` times; the last iterate. P is that of `move`.

    Exactly `steps` forward and backward passes. With early_stop a sample that is already misclassified keeps the
    point that broke it and leaves the batch, so the remaining passes get smaller.
    """
    if early_stop:
        return _pgd_survivors(aim, x, threat, steps=steps, step_size=step_size, start=start, box=box)

    noises = () if aim.noise is None else (aim.noise,)

    def climb(x: Tensor, x_adv: Tensor, target: Tensor, *noise: Tensor) -> Tensor:
        here = replace(aim, target=target, noise=noise[0] if noise else None)
        for _ in range(steps):
            grad, _ = here.gradient(x_adv)
            x_adv = move(x, x_adv, step_size * threat.ascent(grad), threat, box=box)
        return x_adv

    if steps > 0 and type(aim) is Aim and isinstance(aim.model, Replayer):
        name = (aim.loss, threat, steps, step_size, box, len(noises))
        return aim.model.whole(name, climb, x, start, aim.target, *noises)
    return climb(x, start, aim.target, *noises)


def _pgd_survivors(
    aim: Aim, x: Tensor, threat: Threat, *, steps: int, step_size: float, start: Tensor, box: str
) -> Tensor:
    found = start.clone()
    live = torch.arange(x.shape[0], device=x.device)
    x_adv = start
    for _ in range(steps):
        if live.numel() == 0:
            break
        grad, logits = aim.gradient(x_adv)
        broken = safely_broken(logits, aim.y)
        if bool(broken.any()):
            found[live] = x_adv
            keep = (~broken).nonzero().squeeze(1)
            live, aim, x, x_adv, grad = live[keep], aim[keep], x[keep], x_adv[keep], grad[keep]
        x_adv = move(x, x_adv, step_size * threat.ascent(grad), threat, box=box)
    found[live] = x_adv
    return found
