"""Configured Auto-PGD attacks: on a loss of the true label, and toward several target classes at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor, nn

from flatrock.attacks.apgd import Climb, apgd, damage, sphere_start
from flatrock.attacks.losses import cross_entropy, dlr_targeted, label_loss, margin, need_classes, targeted_margin
from flatrock.attacks.pgd import Aim
from flatrock.core.errors import ConfigError
from flatrock.core.options import choose, count
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat
from flatrock.core.threat import rows as per_row
from flatrock.core.types import SampleLoss

# Losses of (logits, (y, T)).
TARGETED_LOSSES: dict[str, SampleLoss] = {"dlr": dlr_targeted, "margin": targeted_margin}


class _Worst:
    """The worst point offered for each sample: most damage first, then the highest score."""

    def __init__(self, x: Tensor) -> None:
        self.x_adv = x.clone()
        self.damage = torch.full((x.shape[0],), -1, dtype=torch.int32, device=x.device)
        self.score = torch.full((x.shape[0],), -torch.inf, dtype=x.dtype, device=x.device)

    def offer(self, samples: Tensor, x_adv: Tensor, harm: Tensor, score: Tensor) -> None:
        """One point for each of these samples."""
        old, best = self.damage[samples], self.score[samples]
        score = score.to(best.dtype)  # logits need not have the type of inputs
        better = (harm > old) | ((harm == old) & (score > best))
        self.x_adv[samples] = torch.where(per_row(better, x_adv), x_adv, self.x_adv[samples])
        self.damage[samples] = torch.where(better, harm, old)
        self.score[samples] = torch.where(better, score, best)

    def open(self, samples: Tensor, *, early_stop: bool) -> Tensor:
        """Those of these samples that are worth another try: with early_stop, those not safely broken yet."""
        return samples[self.damage[samples] < 2] if early_stop else samples


@dataclass(frozen=True, kw_only=True)
class APGD:
    """Auto-PGD on a loss of the true label (ce, cw, dlr, margin); with restarts each sample keeps its worst point.

    eot: gradients, losses and logits are means over this many passes, for networks that answer at random.
    """

    loss: str = "ce"
    steps: int = 100
    restarts: int = 1
    eot: int = 1
    bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        label_loss(self.loss)
        for name in ("steps", "restarts", "eot"):
            count("apgd", name, getattr(self, name), least=1)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """Perturbed copy of x: a misclassified point where one was found, else the one of the largest loss."""
        aim = self._aim(model, y)
        worst, live = _Worst(x), torch.arange(x.shape[0], device=x.device)
        for r in range(self.restarts):
            live = worst.open(live, early_stop=early_stop)
            if live.numel() == 0:
                break
            mine, clean = aim[live], x[live]
            start = sphere_start(clean, threat, gen[live].child("restart", r))
            found = apgd(mine, clean, threat, steps=self.steps, start=start, early_stop=early_stop, eot=self.eot)
            worst.offer(live, found.x_adv, found.damage, mine.loss(found.logits, mine.target))
        return worst.x_adv

    def check(self, threat: Threat | None, classes: int | None) -> None:
        """ConfigError if the loss is not defined for so few classes."""
        need_classes(self.loss, classes)

    @property
    def mixed_labels(self) -> bool:
        """Only cross-entropy is defined on rows of class probabilities."""
        return self.loss == "ce"

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch, at most."""
        return self.restarts * (self.steps + 1) * self.eot

    def _aim(self, model: nn.Module, y: Tensor) -> Aim:
        if not y.is_floating_point():
            return Aim(model, label_loss(self.loss), y, y)
        if not self.mixed_labels:
            raise ConfigError(f"apgd loss {self.loss!r} is not defined on mixed labels; use 'ce'")
        return Aim(model, cross_entropy, y, y.argmax(1))


@dataclass(frozen=True, kw_only=True)
class APGDTargeted:
    """Auto-PGD toward the `targets` classes of the largest clean logits; a sample is broken by any wrong answer.

    loss: 'dlr' (targeted DLR, 4 classes or more) or 'margin' (z_T - z_y). rows: how many pairs of sample and target
    go through the network together, all targets of a sample side by side if they fit, else in turn; take more where
    memory allows. With early_stop a sample broken on the way to one target gives up its others.
    """

    loss: str = "dlr"
    targets: int = 9
    steps: int = 100
    restarts: int = 1
    eot: int = 1
    rows: int = 1024
    mixed_labels: ClassVar[bool] = False
    bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        choose("apgd-t", "loss", self.loss, TARGETED_LOSSES)
        for name in ("targets", "steps", "restarts", "eot", "rows"):
            count("apgd-t", name, getattr(self, name), least=1)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """Perturbed copy of x: of all targets the point that does most damage, then that of the largest margin."""
        if y.is_floating_point():
            raise ConfigError("attack 'apgd-t' is not defined on mixed labels; use 'apgd-ce'")
        if x.shape[0] == 0:
            return x.clone()
        with torch.no_grad():
            logits = model(x)
        self.check(threat, logits.shape[1])
        order = self._targets(logits, y)
        worst, everyone = _Worst(x), torch.arange(x.shape[0], device=x.device)
        worst.offer(everyone, x, damage(logits, y), margin(logits, y))
        together = min(order.shape[1], self.rows)
        for r, first in product(range(self.restarts), range(0, order.shape[1], together)):
            goals = order[:, first : first + together]
            live = worst.open(everyone, early_stop=early_stop)
            if live.numel() == 0:
                break
            for part in torch.split(live, self.rows // together):
                gens = [gen[part].child("restart", r, "target", first + t) for t in range(goals.shape[1])]
                climb = self._climb(model, x[part], y[part], goals[part], threat, gens, early_stop=early_stop)
                score = margin(climb.logits, y[part].repeat(goals.shape[1]))
                each = (v.chunk(goals.shape[1]) for v in (climb.x_adv, climb.damage, score))
                for x_adv, harm, lead in zip(*each, strict=True):
                    worst.offer(part, x_adv, harm, lead)
        return worst.x_adv

    def check(self, threat: Threat | None, classes: int | None) -> None:
        """ConfigError if the loss is not defined for so few classes."""
        need_classes("targeted dlr" if self.loss == "dlr" else self.loss, classes)

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch, at most; a pass over all targets counts once for each."""
        return 1 + min(self.targets, classes - 1) * self.restarts * (self.steps + 1) * self.eot

    def _targets(self, logits: Tensor, y: Tensor) -> Tensor:
        """Target classes of each sample, largest clean logit first.

        The true class is left out rather than the largest: the same thing for a sample that is right.
        """
        order = logits.scatter(1, y[:, None], -torch.inf).argsort(1, descending=True)
        return order[:, : min(self.targets, logits.shape[1] - 1)]

    def _climb(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        goals: Tensor,
        threat: Threat,
        gens: list[SampleGen],
        *,
        early_stop: bool,
    ) -> Climb:
        """Every sample toward each of its goals: rows are the samples for the first goal, then for the second, ..."""
        copies = goals.shape[1]
        labels = y.repeat(copies)
        return apgd(
            Aim(model, TARGETED_LOSSES[self.loss], torch.stack([labels, goals.T.flatten()], 1), labels),
            x.repeat(copies, *[1] * (x.dim() - 1)),
            threat,
            steps=self.steps,
            start=torch.cat([sphere_start(x, threat, g) for g in gens]),
            group=torch.arange(x.shape[0], device=x.device).repeat(copies),
            early_stop=early_stop,
            eot=self.eot,
        )
