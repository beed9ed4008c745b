"""Windows of the Square attack in L2: a window takes over the size of another one, in a new direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from flatrock.attacks.square_windows import Propose, Window, side_length, signs, window
from flatrock.core.rng import SampleGen
from flatrock.core.threat import TINY, Threat

# Tiles of the start along the shorter side of an image.
TILES = 5


def nested(height: int, width: int) -> Tensor:
    """sum_k 1/(k+1)^2 over the centred rectangles that reach k pixels from the middle, of Euclidean norm 1."""
    rows = (torch.arange(height) - height // 2).abs()
    columns = (torch.arange(width) - width // 2).abs()
    weights = torch.arange(1, max(height, width) // 2 + 2, dtype=torch.float64) ** -2
    reach = weights.flip(0).cumsum(0).flip(0)  # of all rectangles that cover a pixel: its own and the larger ones
    pattern = reach[torch.maximum(rows[:, None], columns)]
    return pattern / _length(pattern)


def eta(side: int) -> Tensor:
    """The pattern of a square, in float64: nested rectangles, positive above the middle and negative below; norm 1."""
    top = side // 2
    pattern = torch.cat([nested(top, side), -nested(side - top, side)])
    return pattern / _length(pattern)


def _length(v: Tensor) -> Tensor:
    return v.square().sum().sqrt()


def _square_norm(v: Tensor) -> Tensor:
    """||v||^2 of each sample and channel, [n, c, 1, 1]."""
    return v.square().sum((-2, -1), keepdim=True)


def _unit(v: Tensor) -> Tensor:
    """Each channel divided by its length; a zero channel stays zero."""
    return v / (_square_norm(v).sqrt() + TINY)


@dataclass(frozen=True)
class L2Squares:
    """The change of window 1 turns toward +-eta and takes over the size that window 2, which is cleared, had.

    The pattern is turned by 90 degrees for half of the proposals. An input with one row has no such pattern: a run of
    columns turns toward a direction drawn uniformly from a cube, which also reaches every direction of a plane.
    One instance serves one attack: it keeps the patterns it made, so that a GPU need not wait for copies of them.
    """

    threat: Threat
    patterns: dict[int, Tensor] = field(default_factory=dict)

    def numbers(self, x: Tensor) -> int:
        """Two corners, then a turn and a sign per channel; in one row, a direction."""
        _, channels, height, width = x.shape
        return 4 + (channels * width if height == 1 else 1 + channels)

    def start(self, x: Tensor, gen: SampleGen) -> Tensor:
        """A grid of tiles, each +-eta, scaled to size eps."""
        n, channels, height, width = x.shape
        side = max(min(height, width) // TILES, 1)
        grid = (height // side, width // side)
        plain, turned = (p.repeat(grid) for p in self._pattern(side, x))
        sign = _magnified(signs(gen.child("signs").uniform(x.new_empty(n, channels, *grid)), x), side)
        turn = _magnified(gen.child("turns").uniform(x.new_empty(n, 1, *grid)) < 0.5, side)
        above, left = (height - side * grid[0]) // 2, (width - side * grid[1]) // 2
        tiles = torch.where(turn, turned, plain) * sign
        below, right = height - above - tiles.shape[2], width - left - tiles.shape[3]
        return self._on_sphere(x, F.pad(tiles, (left, right, above, below)))

    def proposals(self, x: Tensor, u: Tensor, fractions: Sequence[float]) -> Propose:
        """The best point after one exchange between windows."""
        return lambda i, best: self._exchanged(x, best, u[:, i], fractions[i])

    def _exchanged(self, x: Tensor, best: Tensor, u: Tensor, p: float) -> Tensor:
        """One proposal.

        With delta the change so far and W1, W2 the windows, each channel of delta inside W1 becomes
        unit(+-eta + unit(delta|W1)) * sqrt(max(eps^2 - ||delta||^2, 0) / c + ||delta|(W1 + W2)||^2).
        """
        channels, height, width = x.shape[1:]
        side = side_length(p, height, width, "l2")
        first, second = window(u[:, :2], side, height, width), window(u[:, 2:4], side, height, width)
        delta = best - x
        fresh = _unit(self._direction(x, u[:, 4:], first, side) * first.inside + _unit(delta * first.inside))
        spare = (self.threat.eps**2 - _square_norm(delta).sum(1, keepdim=True)).clamp_min(0) / channels
        size = (spare + _square_norm(delta * (first.inside | second.inside))).sqrt()
        return self._on_sphere(x, torch.where(first.inside, fresh * size, delta.masked_fill(second.inside, 0)))

    def _direction(self, x: Tensor, u: Tensor, place: Window, side: int) -> Tensor:
        """What a window turns toward, of norm 1 in each channel; what lies outside the window means nothing."""
        n, channels, height, width = x.shape
        if height == 1:
            return _unit((2 * u - 1).to(x.dtype).reshape(n, channels, 1, width) * place.inside)
        turn = (u[:, 0] < 0.5).long()[:, None, None]
        rows, columns = place.rows.clamp(0, side - 1)[:, :, None], place.columns.clamp(0, side - 1)[:, None, :]
        return self._pattern(side, x)[turn, rows, columns][:, None] * signs(u[:, 1:, None, None], x)

    def _pattern(self, side: int, like: Tensor) -> Tensor:
        """The pattern and its transpose, [2, side, side]."""
        if side not in self.patterns:
            pattern = eta(side)
            self.patterns[side] = torch.stack([pattern, pattern.T]).to(like)
        return self.patterns[side]

    def _on_sphere(self, x: Tensor, delta: Tensor) -> Tensor:
        return (x + self.threat.eps * self.threat.ascent(delta)).clamp(0, 1)


def _magnified(tiles: Tensor, side: int) -> Tensor:
    return tiles.repeat_interleave(side, 2).repeat_interleave(side, 3)
