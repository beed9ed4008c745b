"""Windows of the Square attack: how large they are at each query, where they lie, and what Linf paints in them.

Inputs are images [n, c, h, w]; an input with a single row has no squares, its windows are runs of columns. All
random numbers come in as uniforms in [0, 1), one row per sample, so a sample's windows do not depend on its batch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flatrock.core.rng import SampleGen
from flatrock.core.threat import L2

# The painted fraction halves after each of these proposals (counted from 0), as in AutoAttack.
BANDS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


# Number of the proposal and the best point so far -> the point to try, inside ball and box.
Propose = Callable[[int, Tensor], Tensor]


class Squares(Protocol):
    """What a norm does: its random start, and its change of the best point inside a random window."""

    def numbers(self, x: Tensor) -> int:
        """Uniforms per sample that one proposal takes."""

    def start(self, x: Tensor, gen: SampleGen) -> Tensor:
        """A random point on the boundary of the ball, clipped to the box."""

    def proposals(self, x: Tensor, u: Tensor, fractions: Sequence[float]) -> Propose:
        """Several proposals with the uniforms u [n, proposals, numbers], the i-th changing about fractions[i] of x.

        What does not depend on the best point is computed for all of them at once.
        """


def fraction(proposal: int, p_init: float) -> float:
    """p_init / 2^k, k the number of `BANDS` that lie before this proposal."""
    return p_init / 2.0 ** bisect_left(BANDS, proposal)


def side_length(p: float, height: int, width: int, norm: str) -> int:
    """Side of a square with a fraction p of the pixels, in L2 odd and at least 3; in one row, that many columns."""
    least = 3 if norm == L2.norm else 1
    if height == 1:
        return min(max(round(p * width), least), width)
    side = max(round(math.sqrt(p * height * width)), least)
    return min(side | 1 if norm == L2.norm else side, height, width)


@dataclass(frozen=True)
class Window:
    """One window per sample: how far each row and column lies beyond its corner, and which pixels are inside."""

    rows: Tensor
    columns: Tensor
    inside: Tensor


def window(u: Tensor, side: int, height: int, width: int) -> Window:
    """The window of each sample; u [n, 2] picks every place where the window fits alike, the last one included."""
    tall = min(side, height)
    rows = torch.arange(height, device=u.device) - _corner(u[:, :1], tall, height)
    columns = torch.arange(width, device=u.device) - _corner(u[:, 1:2], side, width)
    in_rows, in_columns = (rows >= 0) & (rows < tall), (columns >= 0) & (columns < side)
    return Window(rows, columns, in_rows[:, None, :, None] & in_columns[:, None, None, :])


def _corner(u: Tensor, side: int | Tensor, length: int) -> Tensor:
    return (u * (length - side + 1)).long()


def _covered(u: Tensor, sides: Tensor, length: int) -> Tensor:
    """Which of `length` rows or columns lie in the window: [n, windows, length] for u [n, windows]."""
    beyond = torch.arange(length, device=u.device) - _corner(u, sides, length)[..., None]
    return (beyond >= 0) & (beyond < sides[:, None])


def signs(u: Tensor, like: Tensor) -> Tensor:
    """-1 or +1 alike, in the dtype of `like`."""
    return torch.where(u < 0.5, -1.0, 1.0).to(like.dtype)


@dataclass(frozen=True)
class LinfSquares:
    """Windows filled with +-eps, one sign per channel; starts from vertical stripes of +-eps.

    Adding +-2*eps and clipping to the ball, as the official code does, gives the same: the window becomes +-eps.
    """

    eps: float

    def numbers(self, x: Tensor) -> int:
        """A corner and a sign per channel."""
        return 2 + x.shape[1]

    def start(self, x: Tensor, gen: SampleGen) -> Tensor:
        """x + eps * (one sign per channel and column)."""
        return (x + self.eps * signs(gen.uniform(x[:, :, :1]), x)).clamp(0, 1)

    def proposals(self, x: Tensor, u: Tensor, fractions: Sequence[float]) -> Propose:
        """The best point with one window repainted."""
        height, width = x.shape[-2:]
        sides = torch.tensor([side_length(p, height, width, "linf") for p in fractions])
        sides = sides.to(x.device, non_blocking=True)  # made on a GPU it would be waited for
        places = u[:, : len(sides), :2]
        rows = _covered(places[..., 0], sides.clamp_max(height), height)
        columns = _covered(places[..., 1], sides, width)
        up = u[:, :, 2:, None, None] >= 0.5
        low, high = (x - self.eps).clamp(0, 1), (x + self.eps).clamp(0, 1)

        def propose(i: int, best: Tensor) -> Tensor:
            inside = rows[:, i, None, :, None] & columns[:, i, None, None, :]
            return torch.where(inside, torch.where(up[:, i], high, low), best)

        return propose
