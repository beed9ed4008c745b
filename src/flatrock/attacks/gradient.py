"""Configured gradient attacks: a loss, a start, steps and restarts bound to the PGD kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.attacks.apgd import damage
from flatrock.attacks.losses import cross_entropy, kl, label_loss, need_classes, targeted_margin
from flatrock.attacks.pgd import BOXES, STARTS, Aim, pgd, start_point
from flatrock.attacks.written import Written, is_ours
from flatrock.core.errors import ConfigError
from flatrock.core.numbers import is_finite, is_number
from flatrock.core.registry import unknown
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat
from flatrock.core.types import Attack


@dataclass(frozen=True)
class _MeanAim(Aim):
    """An aim whose gradients, losses and logits are means over `eot` passes: expectation over transformation."""

    eot: int = 1

    def at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss per sample, and the damage done at x according to the mean logits."""
        with torch.no_grad():
            draws = [self.answer(x) for _ in range(self.eot)]
            loss = torch.stack([self.loss(logits, self.target) for logits in draws]).mean(0)
            return loss, damage(torch.stack(draws).mean(0), self.y)

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean gradient of the summed loss w.r.t. x, and the mean logits; one graph is alive at a time."""
        grad, logits = super().gradient(x)
        for _ in range(self.eot - 1):
            again, answer = super().gradient(x)
            grad, logits = grad + again, logits + answer
        return grad / self.eot, logits / self.eot


@dataclass(frozen=True, kw_only=True)
class GradientAttack:
    """PGD on a named loss; with restarts, each sample keeps its worst (broken first, then largest loss).

    eot: gradients, losses and logits are means over this many passes, for networks that answer at random. box: whether
    a step clips to the box before or after it projects on the ball. Start 'wide' is that of AWP's SVHN-L2 code.
    iterate: 'any' lets a sample go at the first point that breaks it, where the caller asks who breaks; 'last' makes
    every step for every sample and returns the last point, as the papers' PGD does, of restarts the one with the
    largest loss, broken or not (of equals the later), as in Rice's and AWP's code.
    """

    loss: str = "ce"
    steps: int = 20
    step_size: float | None = None
    start: str | None = None
    noise: float = 1e-3
    restarts: int = 1
    eot: int = 1
    box: str = "last"
    iterate: str = "any"
    bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        faults = []
        if self.loss != "kl":
            label_loss(self.loss)
        if self.start is None:
            object.__setattr__(self, "start", "gaussian" if self.loss == "kl" else "uniform")
        for name, known in (("start", (*STARTS, "wide")), ("box", BOXES), ("iterate", ("any", "last"))):
            if getattr(self, name) not in known:
                faults.append(unknown(name, getattr(self, name), known))
        for name, least in (("steps", 0), ("restarts", 1), ("eot", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                faults.append(f"{name} must be a whole number >= {least}, got {value!r}")
        if not (self.step_size is None or (is_number(self.step_size) and 0 < self.step_size <= 1)):
            faults.append(f"step_size must lie in (0, 1] (pixel units), got {self.step_size!r}; write 2/255, not 2")
        if not is_finite(self.noise):
            faults.append(f"noise must be a number (pixel units), got {self.noise!r}")
        if self.loss == "kl" and self.start == "zero":
            faults.append("loss 'kl' has zero gradient at the clean input; use start 'gaussian' or 'uniform'")
        if self.start == "wide" and self.steps == 0:
            faults.append("start 'wide' lies outside of the ball until the first step; set steps to 1 or more")
        if faults:
            raise ConfigError("attack options:", tuple(faults))

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """Perturbed copy of x; the caller has put the model in the mode it wants attacked."""
        return self._worst(self._aim(model, x, y), x, threat, gen, early_stop=early_stop and self.iterate == "any")

    def _worst(self, aim: Aim, x: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool) -> Tensor:
        """Of each sample the worst of all restarts."""
        best = self._once(aim, x, threat, gen.child("restart", 0), early_stop=early_stop)
        if self.restarts == 1:
            return best
        loss, damage = aim.at(best)
        for r in range(1, self.restarts):
            again = (damage < 2).nonzero().squeeze(1) if early_stop else torch.arange(x.shape[0], device=x.device)
            if again.numel() == 0:
                break
            tried = self._once(aim[again], x[again], threat, gen[again].child("restart", r), early_stop=early_stop)
            new_loss, new_damage = aim[again].at(tried)
            better = (new_damage > damage[again]) | ((new_damage == damage[again]) & (new_loss > loss[again]))
            if self.iterate == "last":
                better = new_loss >= loss[again]
            rows = again[better]
            best, loss, damage = best.clone(), loss.clone(), damage.clone()
            best[rows], loss[rows], damage[rows] = tried[better], new_loss[better], new_damage[better]
        return best

    def reach(self, threat: Threat) -> float:
        """How far all steps lead if they have one direction."""
        return self.steps * (threat.default_step if self.step_size is None else self.step_size)

    def check(self, threat: Threat | None, classes: int | None) -> None:
        """ConfigError if the loss is not defined for so few classes."""
        need_classes(self.loss, classes)

    @property
    def mixed_labels(self) -> bool:
        """Only cross-entropy and KL are defined on rows of class probabilities."""
        return self.loss in ("ce", "kl")

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch."""
        judged = self.restarts if self.restarts > 1 else 0
        return self.eot * (self.steps * self.restarts + judged + (1 if self.loss == "kl" else 0))

    def _aim(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        aim = self._aim_of_one_pass(model, x, y)
        return aim if self.eot == 1 else _MeanAim(aim.model, aim.loss, aim.target, aim.y, eot=self.eot)

    def _aim_of_one_pass(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        if self.loss == "kl":
            log_clean = self._log_clean(model, x)
            y = y.argmax(1) if y.is_floating_point() else y
            return Aim(model, kl, log_clean, torch.where(y < 0, log_clean.argmax(1), y))  # no label: its own answer
        if y.is_floating_point():
            if not self.mixed_labels:
                raise ConfigError(f"attack loss {self.loss!r} is not defined on mixed labels; use 'ce' or 'kl'")
            return Aim(model, cross_entropy, y, y.argmax(1))
        return Aim(model, label_loss(self.loss), y, y)

    def _log_clean(self, model: nn.Module, x: Tensor) -> Tensor:
        """The clean distribution; of a network that answers at random, the mean of its distributions."""
        with torch.no_grad():
            draws = [F.log_softmax(model(x), 1) for _ in range(self.eot)]
            return draws[0] if self.eot == 1 else torch.stack(draws).logsumexp(0) - math.log(self.eot)

    def _once(self, aim: Aim, x: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool) -> Tensor:
        start = start_point(x, threat, gen, start=self.start or "uniform", noise=self.noise)
        step_size = threat.default_step if self.step_size is None else self.step_size
        climb, steps = partial(pgd, aim, x, threat, step_size=step_size, box=self.box), self.steps
        if early_stop and self.start == "wide":  # what breaks a sample out there is no point of the ball
            start, steps = climb(steps=1, start=start), steps - 1
        return climb(steps=steps, start=start, early_stop=early_stop)


@dataclass(frozen=True, kw_only=True)
class FastGradientSign:
    """x + eps * ascent(grad CE): one step of size eps from x itself."""

    mixed_labels: ClassVar[bool] = True
    bounded: ClassVar[bool] = True

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """Perturbed copy of x; costs one forward and one backward pass."""
        aim = Aim(model, cross_entropy, y, y.argmax(1) if y.is_floating_point() else y)
        return pgd(aim, x, threat, steps=1, step_size=threat.eps, start=x, early_stop=early_stop)

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch."""
        return 1


@dataclass(frozen=True, kw_only=True)
class MultiTargeted:
    """PGD on z_T - z_y for every class T != y in turn, nearest (largest clean logit) first; keeps the worst."""

    steps: int = 20
    step_size: float | None = None
    start: str = "uniform"
    mixed_labels: ClassVar[bool] = False
    bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise ConfigError(unknown("start", self.start, STARTS))
        GradientAttack(steps=self.steps, step_size=self.step_size, start=self.start)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """Perturbed copy of x: the first target that breaks a sample, else the one that came closest."""
        if y.is_floating_point():
            raise ConfigError("attack 'mt' is not defined on mixed labels; use 'pgd' or 'kl-pgd'")
        with torch.no_grad():
            logits = model(x)
        order = logits.scatter(1, y[:, None], -torch.inf).argsort(1, descending=True)
        judge = Aim(model, label_loss("margin"), y, y)
        best, worst = x.clone(), torch.full_like(logits[:, 0], -torch.inf)
        live = torch.arange(x.shape[0], device=x.device)
        step_size = threat.default_step if self.step_size is None else self.step_size
        for rank in range(logits.shape[1] - 1):
            if live.numel() == 0:
                break
            aim = Aim(model, targeted_margin, torch.stack([y[live], order[live, rank]], 1), y[live])
            start = start_point(x[live], threat, gen[live].child("target", rank), start=self.start, noise=1e-3)
            tried = pgd(aim, x[live], threat, steps=self.steps, step_size=step_size, start=start, early_stop=early_stop)
            margin, damage = judge[live].at(tried)
            better = (margin > worst[live]) | (damage == 2)  # a NaN margin compares false, yet breaks the sample
            best[live[better]], worst[live[better]] = tried[better], margin[better]
            live = live[damage < 2] if early_stop else live
        return best

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch."""
        return 1 + (classes - 1) * (self.steps + 1)


def judges_last(attack: Attack) -> bool:
    """Whether an attack, or the one behind a transfer, is judged by its last point, whatever it met on the way."""
    behind = getattr(attack, "by", attack)
    return isinstance(behind, GradientAttack) and behind.iterate == "last"


def idle(attack: Attack) -> bool:
    """Whether an attack, or the one behind a transfer, was told to make no step: it returns where it starts.

    Of the user's a function says it by its option `steps`; what an attribute of a class means is its own affair.
    """
    behind = getattr(attack, "by", attack)
    if isinstance(behind, Written):
        return bool(behind.settings.get("steps", 1) == 0)
    return is_ours(attack) and getattr(behind, "steps", 1) == 0
