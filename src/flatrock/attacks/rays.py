"""RayS (Chen 2020): the nearest label change along rays to the corners of the box, from labels alone.

A ray is a sign vector v in {-1, +1}^D; along clip(x + r * v) the smallest radius r that changes the label is sought.
Signs are flipped block by block, in 1, 2, 4, ... blocks; a flip is kept if it shrinks the radius. The official code
measures r along v / ||v||_2, so its radii are sqrt(D) times the Linf radii here; `tolerance` is in its units.

Differences from the official code. Each sample walks through its blocks at its own pace, so no sample waits for the
searches of others and results do not depend on batching. The clean input is the first query: where it is wrong already,
the distance is exactly 0. The first ray, all +1, is tried itself and not only with a block flipped; in few dimensions
nothing else may lead to it. No search runs past the budget. Directions are fixed, so nothing is random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from flatrock.attacks.pgd import classified_right, safely_broken
from flatrock.core.errors import ConfigError
from flatrock.core.options import count, weight
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Linf, Threat, rows
from flatrock.core.types import Model

# Queries between two looks at who is done: each look makes a GPU wait.
BLOCK = 32
# A binary search in float64 ends above this width, whatever tolerance is asked for.
FINEST = 1e-12


@dataclass(frozen=True)
class _Rays:
    """Samples under attack, one row each.

    row: place in the batch. x: flattened input. signs, radius: the best ray, and where it changes the label (inf: it
    does not). searching: in a binary search on [low, high]. level, block: which signs are flipped at present. done:
    takes no more part and keeps its ray. queries: answers used.
    """

    row: Tensor
    x: Tensor
    y: Tensor
    signs: Tensor
    radius: Tensor
    searching: Tensor
    low: Tensor
    high: Tensor
    level: Tensor
    block: Tensor
    done: Tensor
    queries: Tensor

    @classmethod
    def begun(cls, x: Tensor, y: Tensor, *, wrong: Tensor) -> _Rays:
        """After the first query, of the clean inputs x: those that are wrong have nothing to search."""
        zero, never = torch.zeros_like(y), torch.zeros_like(wrong)
        none = torch.full_like(y, torch.inf, dtype=torch.float64)
        radius = none.masked_fill(wrong, 0)
        row = torch.arange(len(x), device=x.device)
        # The first ray is all +1 itself: a block behind the last coordinate, one level early, flips nothing.
        level, block = zero - 1, zero + x.shape[1]
        return cls(row, x, y, torch.ones_like(x), radius, never, none, none, level, block, wrong, zero + 1)

    def undone(self) -> _Rays:
        """Those who still take part."""
        keep = (~self.done).nonzero().squeeze(1)
        return _Rays(*(getattr(self, f.name)[keep] for f in fields(self)))

    def points(self, signs: Tensor, radius: Tensor) -> Tensor:
        """clip(x + radius * signs); a radius of 1 or more ends in a corner of the box."""
        return (self.x + radius.clamp(max=1).to(self.x.dtype)[:, None] * signs).clamp(0, 1)

    def flipped(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """The signs with the present block flipped, and whether it is the last block of its level."""
        size = sizes[self.level]
        ahead = torch.arange(self.x.shape[1], device=self.x.device) - (self.block * size)[:, None]
        last = (self.block + 1) * size >= self.x.shape[1]
        return torch.where((ahead >= 0) & (ahead < size[:, None]), -self.signs, self.signs), last


def block_sizes(dimension: int) -> list[int]:
    """Size of the blocks of level L, ceil(D / 2^L), down to the level of single coordinates, which then repeats."""
    return [-(-dimension // 2**level) for level in range((dimension - 1).bit_length() + 1)]


def _query(model: Model, s: _Rays, sizes: Tensor, *, width: float, leave_within: float | None) -> _Rays:
    """One query per sample: does the flipped ray change the label at the best radius; if so, where does it first?

    A flip that keeps the label at the best radius is dropped after that one query. Else the radius is bisected until
    the interval is at most `width`, and the flip is kept if the radius shrank.
    """
    signs, last = s.flipped(sizes)
    radius = torch.where(s.searching, (s.low + s.high) / 2, s.radius.clamp(max=1))
    tried = s.points(signs, radius)
    logits = model(tried)
    wrong = ~classified_right(logits, s.y)
    low = torch.where(s.searching, torch.where(wrong, s.low, radius), 0.0)
    high = torch.where(wrong, radius, s.high)
    ended = s.searching & (high - low <= width)
    passed = ended | ~(s.searching | wrong)
    take, done = ended & (high < s.radius) & ~s.done, s.done
    if leave_within is not None:
        leaves = safely_broken(logits, s.y) & ((tried - s.x).abs().amax(1) <= leave_within) & ~s.done
        take, done, high = take | leaves, done | leaves, torch.where(leaves, radius, high)
    return replace(
        s,
        signs=torch.where(take[:, None], signs, s.signs),
        radius=torch.where(take, high, s.radius),
        searching=torch.where(s.searching, ~ended, wrong),
        low=low,
        high=high,
        level=(s.level + (passed & last)).clamp(max=len(sizes) - 1),
        block=torch.where(passed, torch.where(last, 0, s.block + 1), s.block),
        done=done,
        queries=s.queries + ~s.done,
    )


def _cut_short(s: _Rays, sizes: Tensor) -> _Rays:
    """The budget is spent: what an unfinished search has found so far counts."""
    take = s.searching & (s.high < s.radius) & ~s.done
    signs = torch.where(take[:, None], s.flipped(sizes)[0], s.signs)
    return replace(s, signs=signs, radius=torch.where(take, s.high, s.radius))


def follow_rays(
    model: Model, x: Tensor, y: Tensor, *, queries: int, tolerance: float = 1e-3, leave_within: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Nearest label change found for each row of x: the point, its radius (inf: none), and the queries used.

    `leave_within`: a sample that is safely broken within this Linf distance leaves with that point.
    """

    def answers(flat: Tensor) -> Tensor:
        return model(flat.reshape(len(flat), *x.shape[1:]))

    flat = x.flatten(1)
    dimension = flat.shape[1]
    sizes = torch.tensor(block_sizes(dimension), device=x.device)
    width = max(tolerance / math.sqrt(dimension), FINEST)
    s = _Rays.begun(flat, y, wrong=~classified_right(model(x), y))
    found = flat.clone(), s.radius.clone(), s.queries.clone()

    def store(s: _Rays) -> None:
        for whole, part in zip(found, (s.points(s.signs, s.radius), s.radius, s.queries), strict=True):
            whole[s.row] = part

    for begin in range(1, queries, BLOCK):
        store(s)
        s = s.undone()
        if s.row.numel() == 0:
            break
        for _ in range(begin, min(begin + BLOCK, queries)):
            s = _query(answers, s, sizes, width=width, leave_within=leave_within)
    store(_cut_short(s, sizes))
    return found[0].reshape(x.shape), found[1], found[2]


@dataclass(frozen=True, kw_only=True)
class RayS:
    """The nearest label change along rays to corners of the box, from labels alone; x itself if it is beyond eps.

    queries: labels asked for, that of the clean input included. tolerance: where binary searches stop, in units of
    the L2 radius: tolerance / sqrt(D) in Linf. Points lie that close to the decision boundary; with early_stop a
    sample leaves at the first one in the ball that breaks it safely (all that logits are looked at for). Linf only.
    """

    queries: int = 10000
    tolerance: float = 1e-3
    mixed_labels: ClassVar[bool] = False
    bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        count("rays", "queries", self.queries, least=1)
        weight("rays", "tolerance", self.tolerance)
        if self.tolerance == 0:
            raise ConfigError("rays tolerance must be larger than 0, or its binary searches never end; use 1e-3")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """The nearest point found that changes the label, where it lies in the ball; else x."""
        self.check(threat, None)
        if y.is_floating_point():
            raise ConfigError("attack 'rays' is not defined on mixed labels; use 'pgd' or 'kl-pgd'")
        with torch.no_grad():
            points, radius, _ = follow_rays(
                model,
                x,
                y,
                queries=self.queries,
                tolerance=self.tolerance,
                leave_within=threat.eps if early_stop else None,
            )
            near = torch.isfinite(radius) & (threat.size(points - x) <= threat.eps)
            return torch.where(rows(near, x), points, x)

    def check(self, threat: Threat | None, classes: int | None) -> None:
        """ConfigError in another norm than linf."""
        if threat is not None and threat.norm != Linf.norm:
            raise ConfigError(
                f"attack 'rays' measures linf distances, got {threat.norm}; use 'square', also gradient-free"
            )

    def passes(self, classes: int) -> int:
        """Forward passes of the network per batch, at most."""
        return self.queries
