"""The configured boundary attacks FAB and FAB-T."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor, nn

from flatrock.attacks.fab import Found, fab, nothing_found
from flatrock.attacks.pgd import classified_right
from flatrock.core.errors import ConfigError
from flatrock.core.options import count
from flatrock.core.rng import SampleGen
from flatrock.core.threat import L2, TINY, Threat, rows


def random_start(x: Tensor, threat: Threat, radius: Tensor, gen: SampleGen) -> Tensor:
    """x + radius * u / ||u|| inside the box: u uniform in Linf, gaussian in L2."""
    u = gen.normal(x) if threat.norm == L2.norm else 2 * gen.uniform(x) - 1
    return (x + rows(radius / threat.size(u).clamp_min(TINY), x) * u).clamp(0, 1)


def side_by_side(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    runs: Tensor,
    threat: Threat,
    *,
    steps: int,
    starts: Sequence[Tensor] | None = None,
    early_stop: bool = False,
) -> Found:
    """`fab` on every sample once per run, runs [n, R, K] naming its rivals, all in one batch; the best of each."""
    times, n = runs.shape[1], x.shape[0]
    found = fab(
        model,
        torch.cat([x] * times),
        y.repeat(times),
        runs.transpose(0, 1).flatten(0, 1),
        threat,
        steps=steps,
        start=None if starts is None else torch.cat(list(starts)),
        group=torch.arange(n, device=x.device).repeat(times),
        early_stop=early_stop,
    )
    parts = torch.arange(n * times, device=x.device).reshape(times, n)
    return reduce(Found.improved, (found[part] for part in parts))


@dataclass(frozen=True, kw_only=True)
class FastAdaptiveBoundary:
    """FAB against all classes at once: every step takes the nearest plane, for a backward pass per rival class.

    Restart 0 starts at x, a later one at half of min(best distance, eps) from it in a random direction.
    """

    steps: int = 100
    restarts: int = 1
    mixed_labels: ClassVar[bool] = False
    bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        count("fab", "steps", self.steps, least=1)
        count("fab", "restarts", self.restarts, least=1)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """The closest adversarial point where it lies in the ball, elsewhere x itself."""
        found = self.search(model, x, y, threat, gen, early_stop=early_stop)
        return torch.where(rows(found.distance <= threat.eps, x), found.points, x)

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch; a run against several rivals makes more backward ones."""
        return 1 + 2 * self.steps * self.restarts

    def search(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Found:
        """The closest adversarial point of every sample; one that is wrong already keeps x, at distance 0."""
        if y.is_floating_point():
            raise ConfigError("attack 'fab' is not defined on mixed labels; use 'pgd' or 'kl-pgd'")
        if x.shape[0] == 0:
            return nothing_found(x)
        x = x.detach()
        with torch.no_grad():
            logits = model(x)
        right = classified_right(logits, y)
        found = Found(x, torch.where(right, torch.inf, 0).to(x.dtype), ~right)
        runs = self._runs(logits.scatter(1, y[:, None], -torch.inf).argsort(1, descending=True)[:, :-1])
        for restart in range(self.restarts):
            radius = 0.5 * found.distance.clamp(max=threat.eps)
            done = 0
            while done < runs.shape[1] and (live := (~found.final).nonzero().squeeze(1)).numel():
                block = runs[live, done : done + self._at_once(live.numel())]
                fresh = (gen[live].child("restart", restart, "run", done + r) for r in range(block.shape[1]))
                starts = [random_start(x[live], threat, radius[live], g) for g in fresh] if restart else None
                new = side_by_side(
                    model, x[live], y[live], block, threat, steps=self.steps, starts=starts, early_stop=early_stop
                )
                found = found.put(live, found[live].improved(new))
                done += block.shape[1]
        return found

    def _runs(self, nearest_first: Tensor) -> Tensor:
        """[n, runs, rivals of a run] from the classes that are wrong, by falling clean logit."""
        return nearest_first[:, None]

    def _at_once(self, samples: int) -> int:
        """How many runs of this many samples share a batch."""
        return 1


@dataclass(frozen=True, kw_only=True)
class TargetedBoundary(FastAdaptiveBoundary):
    """FAB-T: a run against each of the `targets` classes with the largest clean logits, for one backward pass a step.

    A model with fewer rival classes than `targets` is attacked towards all it has. Targets of a sample share a
    batch of up to `rows` rows, and with early_stop they leave together.
    """

    targets: int = 9
    rows: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        count("fab-t", "targets", self.targets, least=1)
        count("fab-t", "rows", self.rows, least=1)

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch, were every target a batch of its own."""
        return 1 + 2 * self.steps * self.restarts * min(self.targets, classes - 1)

    def _runs(self, nearest_first: Tensor) -> Tensor:
        return nearest_first[:, : self.targets, None]

    def _at_once(self, samples: int) -> int:
        return max(1, self.rows // samples)
