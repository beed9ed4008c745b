"""A file of methods as a user would write it: copies of built-in ones, and one that does nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

METHODS = '''
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.core.hooks import Flatness, Nudge, Penalty
from flatrock.core.options import weight
from flatrock.core.types import Parts
from flatrock.engine.schedule import Schedule


class Trades:
    """TRADES written out."""

    passes = ("clean", "adv")
    inner_loss = "kl"
    hard_labels = False

    def __init__(self, *, beta: float = 6.0) -> None:
        weight("Trades", "beta", beta)
        self.beta = beta

    def loss(self, views, y):
        s, t = F.log_softmax(views.clean.logits, 1), F.log_softmax(views.adv.logits, 1)
        kl = F.kl_div(t, s, reduction="none", log_target=True).sum(1).mean()
        ce = F.cross_entropy(views.clean.logits, y, reduction="none").sum() / len(y)
        return Parts({"ce": ce, "kl": kl}, {"ce": 1.0, "kl": self.beta})


class Nothing(Flatness):
    """A method without strength."""

    def in_loss(self, look):
        return None


class Climber(Flatness):
    """SAM written out."""

    moves_weights = True

    def __init__(self, *, rho: float = 0.05) -> None:
        self.rho = rho

    def before_loss(self, scene):
        g = scene.gradients({}, scene.points)
        length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(v) for v in g.values()]))
        return Nudge({n: v * (self.rho / length.clamp_min(1e-20)) for n, v in g.items()}, scene.points)


class Smaller(Flatness):
    """Adds weight times the mean square of the logits."""

    needs = ("clean",)

    def __init__(self, *, weight: float = 0.1) -> None:
        self.weight = weight

    def in_loss(self, look):
        return Penalty({"smaller": look.views.clean.logits.square().mean()}, {"smaller": self.weight})


def climb(model, x, y, threat, gen, *, steps: int = 20, step_size: float | None = None) -> Tensor:
    """PGD written out."""
    size = threat.default_step if step_size is None else step_size
    x_adv = (x + threat.sample(x, gen.child("restart", 0))).clamp(0, 1)
    for _ in range(steps):
        leaf = x_adv.detach().requires_grad_(True)
        with torch.enable_grad():
            loss = F.cross_entropy(model(leaf), y, reduction="none").sum()
        step = size * threat.ascent(torch.autograd.grad(loss, leaf)[0])
        x_adv = (x + threat.project(x_adv + step - x)).clamp(0, 1)
    return x_adv


@dataclass(frozen=True, kw_only=True)
class Climb:
    """The same as a class."""

    steps: int = 20
    step_size: float | None = None
    mixed_labels = False
    bounded = True

    def __call__(self, model, x, y, threat, gen, *, early_stop=False):
        return climb(model, x, y, threat, gen, steps=self.steps, step_size=self.step_size)

    def passes(self, classes):
        return self.steps


def sgd(params: list, *, lr: float, momentum: float = 0.0, nesterov: bool = False) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=nesterov)


class Adam(torch.optim.AdamW):
    pass


def fall(t: float, *, lr: float, epochs: float) -> float:
    """The cosine schedule written out."""
    return lr / 2 * (1 + math.cos(math.pi * min(t / epochs, 1.0)))


class Fall(Schedule):
    def rate(self, t):
        return fall(t, lr=self.lr, epochs=self.epochs)
'''


@contextmanager
def among_methods(folder: Path, source: str = METHODS) -> Iterator[Path]:
    """In a folder with mymethods.py: recipes name methods of the current folder only."""
    (folder / "mymethods.py").write_text(source)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder / "mymethods.py"
    finally:
        os.chdir(before)
        sys.modules.pop("mymethods", None)
