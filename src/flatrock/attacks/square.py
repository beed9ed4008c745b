"""Square attack (Andriushchenko 2020), as in AutoAttack: random search on the margin, with no gradient at all.

Differences from the official code. Random numbers belong to samples: each has windows and signs of its own, where
the official code gives one window to the whole batch, so results do not depend on batching. A window may also touch
the last row or column, which the official code never reaches. Samples that survive keep the point that came closest
instead of the clean input. The first of `queries` is the random start; the official count leaves it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from flatrock.attacks.losses import margin
from flatrock.attacks.pgd import safely_broken
from flatrock.attacks.square_l2 import L2Squares
from flatrock.attacks.square_windows import LinfSquares, Squares, fraction
from flatrock.core.errors import ConfigError
from flatrock.core.options import count, weight
from flatrock.core.rng import SampleGen
from flatrock.core.threat import L2, Linf, Threat
from flatrock.core.types import Model

# Proposals between two looks at who is broken: each look makes a GPU wait. Random numbers are drawn as many at once.
BLOCK = 32


@dataclass(frozen=True)
class _Search:
    """Samples in search: their rows in the batch, and the best point of each. Who is done keeps its point."""

    rows: Tensor
    x: Tensor
    y: Tensor
    best: Tensor
    score: Tensor
    done: Tensor
    gen: SampleGen

    def undone(self) -> _Search:
        """Those who are not done."""
        k = (~self.done).nonzero().squeeze(1)
        return _Search(
            self.rows[k], self.x[k], self.y[k], self.best[k], self.score[k], done=self.done[k], gen=self.gen[k]
        )

    def store(self, found: tuple[Tensor, Tensor, Tensor]) -> None:
        """Write best points, scores and who is done to their rows of the batch."""
        for whole, part in zip(found, (self.best, self.score, self.done), strict=True):
            whole[self.rows] = part

    def after(self, tried: Tensor, score: Tensor, done: Tensor) -> _Search:
        """With the points that were tried in the place of those they beat."""
        better = (score > self.score) & ~self.done
        best = torch.where(better[:, None, None, None], tried, self.best)
        score = torch.where(better, score, self.score)
        return replace(self, best=best, score=score, done=self.done | (better & done))


def look(model: Model, x: Tensor, y: Tensor, *, early_stop: bool) -> tuple[Tensor, Tensor]:
    """What the search climbs, max_{k != y} z_k - z_y (infinite without a finite answer), and who may leave."""
    logits = model(x)
    score = torch.where(logits.abs().amax(1) < torch.inf, margin(logits, y), torch.inf)
    return score, safely_broken(logits, y) if early_stop else torch.zeros_like(y, dtype=torch.bool)


def search(
    model: Model,
    x: Tensor,
    y: Tensor,
    squares: Squares,
    gen: SampleGen,
    *,
    queries: int,
    p_init: float = 0.8,
    early_stop: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Best points for images x [n, c, h, w] after `queries` answers of the model, their margins, and who may leave.

    A proposal replaces the best point only if its margin is strictly larger. With early_stop a sample that is safely
    broken keeps the point that broke it.
    """
    start = squares.start(x, gen.child("start"))
    score, done = look(model, start, y, early_stop=early_stop)
    state = _Search(torch.arange(len(x), device=x.device), x, y, start, score, done, gen)
    found = start.clone(), score.clone(), done.clone()
    for begin in range(0, queries - 1, BLOCK):
        if early_stop:
            state.store(found)
            state = state.undone()
        if state.rows.numel() == 0:
            return found
        like = x.new_empty((len(state.x), BLOCK, squares.numbers(x)), dtype=torch.float64)
        u = state.gen.child("block", begin).uniform(like)
        block = range(begin, min(begin + BLOCK, queries - 1))
        propose = squares.proposals(state.x, u, [fraction(i, p_init) for i in block])
        for i in range(len(block)):
            tried = propose(i, state.best)
            state = state.after(tried, *look(model, tried, state.y, early_stop=early_stop))
    state.store(found)
    return found


def as_images(x: Tensor) -> Tensor:
    """Any batch as [n, c, h, w]: vectors and sequences become one row, axes before the last two become channels."""
    if x.dim() < 4:
        return x.reshape(len(x), x.shape[1] if x.dim() == 3 else 1, 1, x.shape[-1])
    return x.reshape(len(x), math.prod(x.shape[1:-2]), *x.shape[-2:])


def squares_for(threat: Threat) -> Squares:
    """How the search moves in the norm of this threat."""
    if threat.norm == Linf.norm:
        return LinfSquares(threat.eps)
    if threat.norm == L2.norm:
        return L2Squares(threat)
    raise ConfigError(f"attack 'square' knows the norms linf and l2, got {threat.norm!r}; use 'pgd'")


@dataclass(frozen=True, kw_only=True)
class Square:
    """Random windows of +-eps (Linf) or of a bump pattern (L2), kept where the margin grows; no gradients needed.

    queries: points tried per restart, the random start included. p_init: fraction of pixels the first windows cover;
    it halves after 10, 50, 200, 500, 1000, 2000, 4000, 6000 and 8000 proposals. restarts: fresh searches; each sample
    keeps its worst point. Vectors have no squares: their windows are runs of coordinates.
    """

    queries: int = 5000
    p_init: float = 0.8
    restarts: int = 1
    mixed_labels: ClassVar[bool] = False
    bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        count("square", "queries", self.queries, least=1)
        count("square", "restarts", self.restarts, least=1)
        weight("square", "p_init", self.p_init)
        if not 0 < self.p_init <= 1:
            raise ConfigError(f"square p_init must lie in (0, 1], a fraction of the pixels, got {self.p_init!r}")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """The point of largest margin met, the clean input included, so that no wrong sample is made right."""
        if y.is_floating_point():
            raise ConfigError("attack 'square' is not defined on mixed labels; use 'pgd' or 'kl-pgd'")
        with torch.no_grad():
            return self._worst(
                lambda images: model(images.reshape(len(images), *x.shape[1:])),
                as_images(x),
                y,
                squares_for(threat),
                gen,
                early_stop=early_stop,
            ).reshape(x.shape)

    def check(self, threat: Threat | None, classes: int | None) -> None:
        """ConfigError in a norm without windows of its own."""
        if threat is not None:
            squares_for(threat)

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch: one for the clean inputs, then every query."""
        return 1 + self.restarts * self.queries

    def _worst(
        self, model: Model, x: Tensor, y: Tensor, squares: Squares, gen: SampleGen, *, early_stop: bool
    ) -> Tensor:
        best = x.clone()
        score, done = look(model, x, y, early_stop=early_stop)
        for restart in range(self.restarts):
            live = (~done).nonzero().squeeze(1)
            if live.numel() == 0:
                break
            tried, reached, broken = search(
                model,
                x[live],
                y[live],
                squares,
                gen[live].child("restart", restart),
                queries=self.queries,
                p_init=self.p_init,
                early_stop=early_stop,
            )
            wins = reached > score[live]
            rows = live[wins]
            best[rows], score[rows], done[rows] = tried[wins], reached[wins], broken[wins]
        return best
