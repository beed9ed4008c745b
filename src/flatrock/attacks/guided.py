"""GAT's attack: one step, guided by the distance from the clean answer (Sriramanan et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.attacks.losses import GuidedLoss, cross_entropy
from flatrock.attacks.pgd import Aim, pgd
from flatrock.core.hooks import Moment
from flatrock.core.options import choose, share, weight
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat

GUIDES = ("alternate", "always", "never")


@dataclass(frozen=True, kw_only=True)
class Guided:
    """x' = P(x0 + eps * ascent(grad [CE(z(x0), y) + a * weight * ||s(x) - s(x0)||_2^2])), x0 = x + offset * eps * B.

    B is +1 or -1 with equal odds at every coordinate: x0 lies 4/255 from x at eps 8/255, and P clips to ball and box.
    s(x) is a constant. `guide` is a: 'alternate' 0 and 1 in turn by the number of the training step, 'always' 1 and
    'never' 0. `weight` is `rise` times as large from the share `rise_after` of training on.

    Published are these constants in linf. Our choices: step 0, the first, has a = 0, and the turns go on across epochs;
    the start is clipped to the box, as every start here is; in l2 the start is offset * eps * B / ||B||_2 away; where
    there are no steps, outside of training, 'alternate' is 'always' and nothing rises.
    """

    weight: float = 10.0
    rise: float = 4.0
    rise_after: float = 0.85
    offset: float = 0.5
    guide: str = "alternate"
    mixed_labels: ClassVar[bool] = True
    bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("weight", "rise"):
            weight("guided", name, getattr(self, name))
        for name in ("rise_after", "offset"):
            share("guided", name, getattr(self, name))
        choose("guided", "guide", self.guide, GUIDES)

    def at(self, moment: Moment) -> Guided:
        """The attack of this step: of its turn and with its weight, which does not rise again."""
        turn = ("never", "always")[moment.step % 2] if self.guide == "alternate" else self.guide
        grown = self.rise if moment.share >= self.rise_after else 1.0
        return replace(self, weight=grown * self.weight, rise=1.0, guide=turn)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """Perturbed copy of x; one forward and one backward pass, and if guided a forward pass of the clean inputs."""
        aim = self._aim(model, x, y)
        heads = gen.child("start").uniform(x) < 0.5
        start = (x + self.offset * threat.eps * threat.ascent(2 * heads.to(x.dtype) - 1)).clamp(0, 1)
        return pgd(aim, x, threat, steps=1, step_size=threat.eps, start=start, early_stop=early_stop)

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch, at most."""
        return 2 if self._guided else 1

    @property
    def _guided(self) -> bool:
        return self.guide != "never" and self.weight > 0

    def _aim(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        hard = y.argmax(1) if y.is_floating_point() else y
        if not self._guided:
            return Aim(model, cross_entropy, y, hard)
        with torch.no_grad():
            clean = F.softmax(model(x), 1)
        # Labels as rows, so that both are one target; not by `one_hot`, which may wait for a GPU.
        label = y if y.is_floating_point() else torch.zeros_like(clean).scatter(1, y[:, None], 1.0)
        return Aim(model, GuidedLoss(self.weight), torch.cat([label.to(clean.dtype), clean], 1), hard)
