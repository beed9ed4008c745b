"""ATENT's attack: a noisy walk up the loss that samples strong perturbations instead of seeking the strongest.

The walk samples p(x') ~ exp((CE(x', y) - gamma/2 * ||x' - x||^2) / c^2), c the noise scale, by unadjusted Langevin
steps. Its authors print one step and run another; both are here, by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from flatrock.attacks.craft import SLACK
from flatrock.attacks.gradient import GradientAttack
from flatrock.attacks.losses import cross_entropy
from flatrock.attacks.pgd import STARTS, Aim, move, safely_broken, start_point
from flatrock.core.errors import ConfigError
from flatrock.core.options import choose, count, weight
from flatrock.core.rng import SampleGen
from flatrock.core.threat import L2, Threat
from flatrock.core.types import Point, Replayer

WALK_STARTS = ("corner", *STARTS)
DRIFTS = ("code", "paper")
PROJECTIONS = ("every", "last", "never")
# Pull toward x where none is given: the released l2 training has it, the linf one relies on its ball.
L2_PULL = 0.05
# Scale of a 'gaussian' start, PGD's own; `noise` is a temperature and would make another start of it.
START_NOISE = 1e-3


def langevin_step(
    x: Tensor, x_adv: Tensor, grad: Tensor, *, threat: Threat, step_size: float, gamma: float, drift: str
) -> Tensor:
    """What one step adds to x_adv before noise; a pull of 0 is left out, so that it changes no bit.

    'paper': step_size * (g + gamma * (x - x')), g the gradient itself. 'code': step_size * ascent(g) +
    gamma * (x - x'), where ascent is sign(g) in linf and g / ||g|| in l2, and the step does not scale the pull.
    """
    if drift == "paper":
        return step_size * (grad + gamma * (x - x_adv) if gamma else grad)
    step = step_size * threat.ascent(grad)
    return step + gamma * (x - x_adv) if gamma else step


@dataclass(frozen=True, kw_only=True)
class Langevin:
    """x' <- clip(x' + drift(x') + noise * sqrt(2 * step_size) * N(0, I)), `steps` times; noise is the paper's epsilon.

    step_size: None is the threat's own (linf eps/4: 0.0078 at 0.031, where ATENT trains with 0.007 and attacks with
    0.003). gamma: pull toward x, None is 0.05 in l2 and 0 in linf. start: 'corner' x + eps * sign(N) in linf, on the
    sphere in l2; or one of PGD's. drift: see `langevin_step`. project: on the ball at 'every' step, at the 'last', or
    'never' (the released l2 training, which relies on gamma); the box [0, 1] always holds. average: alpha of training,
    where the loss is a moving average over the walk: that of step k of K weighs alpha * (1 - alpha)^(K - k).
    """

    steps: int = 10
    step_size: float | None = None
    noise: float = 1e-3
    gamma: float | None = None
    start: str = "corner"
    drift: str = "code"
    project: str = "last"
    average: float = 0.9
    mixed_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        GradientAttack(steps=self.steps, step_size=self.step_size)
        count("langevin", "steps", self.steps, least=1)
        weight("langevin", "noise", self.noise)
        if self.gamma is not None:
            weight("langevin", "gamma", self.gamma)
        weight("langevin", "average", self.average)
        if not 0 < self.average <= 1:
            raise ConfigError(f"langevin average must lie in (0, 1], got {self.average!r}; 1 trains on the last input")
        choose("langevin", "start", self.start, WALK_STARTS)
        choose("langevin", "drift", self.drift, DRIFTS)
        choose("langevin", "project", self.project, PROJECTIONS)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """The last input of the walk; with early_stop the first one inside the ball that safely breaks a sample."""
        if early_stop:
            return self._survivors(model, x, y, threat, gen)
        return self._walk(model, x, y, threat, gen, keep=1)[:, 0]

    def path(self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen) -> tuple[Point, ...]:
        """The input after every step and the weight of its loss; with average 1 only the last."""
        walk = self._walk(model, x, y, threat, gen, keep=self.points).unbind(1)
        if self.average == 1:
            return (Point(walk[0]),)
        weights = (self.average * (1 - self.average) ** (self.steps - k) for k in range(1, self.steps + 1))
        # Contiguous: a layout of its own would be compiled for itself.
        return tuple(Point(x_adv.contiguous(), share) for x_adv, share in zip(walk, weights, strict=True))

    @property
    def points(self) -> int:
        """How many inputs `path` returns."""
        return 1 if self.average == 1 else self.steps

    @property
    def bounded(self) -> bool:
        """Whether the last input lies in the ball; those before it do only with project 'every'."""
        return self.project != "never"

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch."""
        return self.steps

    def pull(self, threat: Threat) -> float:
        """gamma, or what stands for it in this threat."""
        if self.gamma is None:
            return L2_PULL if threat.norm == L2.norm else 0.0
        return self.gamma

    def _walk(self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, keep: int) -> Tensor:
        """For every sample the inputs after the last `keep` steps, in order.

        All noise is drawn before: a GPU then replays the whole walk as one recording, as it does PGD.
        """
        start = self._start(x, threat, gen.child("start"))
        noises = [gen.child("noise", k).normal(x) for k in range(1, self.steps + 1)] if self.noise else []

        def walk(x: Tensor, x_adv: Tensor, y: Tensor, *noises: Tensor) -> Tensor:
            aim, found = _aim(model, y), list[Tensor]()
            for k in range(self.steps):
                grad, _ = aim.gradient(x_adv)
                noise = noises[k] if noises else None
                x_adv = self._moved(x, x_adv, grad, threat, noise, last=k == self.steps - 1)
                found = [*found, x_adv][-keep:]
            return torch.stack(found, 1)

        if isinstance(model, Replayer):
            return model.whole((self, threat, keep), walk, x, start, y, *noises)
        return walk(x, start, y, *noises)

    def _survivors(self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen) -> Tensor:
        """Who is broken stops and leaves the batch."""
        aim, live = _aim(model, y), torch.arange(x.shape[0], device=x.device)
        x_adv = self._start(x, threat, gen.child("start"))
        found = x_adv.clone()
        for k in range(1, self.steps + 1):
            grad, logits = aim.gradient(x_adv)
            # Only a point inside the ball may end the walk: the network's answer elsewhere proves nothing.
            # Half the slack, so that the guard, which rounds too, agrees.
            inside = threat.size(x_adv - x) <= threat.eps + SLACK / 2
            done = safely_broken(logits, aim.y) & inside
            if bool(done.all()):
                break
            keep = (~done).nonzero().squeeze(1)
            live, aim, x, x_adv, grad, gen = live[keep], aim[keep], x[keep], x_adv[keep], grad[keep], gen[keep]
            noise = gen.child("noise", k).normal(x) if self.noise else None
            x_adv = self._moved(x, x_adv, grad, threat, noise, last=k == self.steps)
            found[live] = x_adv
        return found

    def _start(self, x: Tensor, threat: Threat, gen: SampleGen) -> Tensor:
        if self.start == "corner":
            return (x + threat.eps * threat.ascent(gen.normal(x))).clamp(0, 1)
        return start_point(x, threat, gen, start=self.start, noise=START_NOISE)

    def _moved(
        self, x: Tensor, x_adv: Tensor, grad: Tensor, threat: Threat, noise: Tensor | None, *, last: bool
    ) -> Tensor:
        step_size = threat.default_step if self.step_size is None else self.step_size
        step = langevin_step(
            x, x_adv, grad, threat=threat, step_size=step_size, gamma=self.pull(threat), drift=self.drift
        )
        if noise is not None:
            step = step + self.noise * math.sqrt(2 * step_size) * noise
        if self.project == "every" or (self.project == "last" and last):
            return move(x, x_adv, step, threat)
        return (x_adv + step).clamp(0, 1)


def _aim(model: nn.Module, y: Tensor) -> Aim:
    """Cross-entropy of labels, or of soft ones, whose largest counts as the class."""
    return Aim(model, cross_entropy, y, y.argmax(1) if y.is_floating_point() else y)
