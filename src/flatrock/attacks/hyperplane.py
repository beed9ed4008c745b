"""The shortest way from a point of the box [0, 1]^D onto a hyperplane {z : <w, z> = b}, without leaving the box.

In both norms the answer has one unknown, the level t >= 0. With c = <w, x> - b, coordinate i moves against
sign(c) * sign(w_i), by min(t, room_i) in Linf and by min(t * |w_i|, room_i) in L2, where room_i is what the box leaves
on that side. The gap that is closed grows with t,

g(t) = sum_i v_i * min(t, r_i),   Linf: v = |w|, r = room;   L2: v = w^2, r = room / |w|,

piecewise linear with kinks at r, so g(t) = |c| is solved exactly once the kinks are sorted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flatrock.core.threat import L2


def close_gap(points: Tensor, w: Tensor, gap: Tensor, norm: str) -> Tensor:
    """d of least norm with <w_i, x_i + d_i> = b_i and x_i + d_i in the box, for every row; `norm` is 'linf' or 'l2'.

    points and w are [n, D]. The plane is given by gap [n] = <w, x> - b: exact where b itself would drown a small gap.
    Where it misses the box, d leads to the corner nearest to it.
    """
    scale = w.abs().amax(1).clamp_min(torch.finfo(w.dtype).tiny)  # so that squares neither vanish nor overflow
    w, gap = w / scale[:, None], gap / scale
    size = w.abs()
    falls = (w > 0) == (gap >= 0)[:, None]
    room = torch.where(falls, points, 1 - points)
    weight, kink = (size.square(), _ratio(room, size)) if norm == L2.norm else (size, room)
    level = _level(weight, kink, size * room, gap.abs())[:, None]
    move = torch.minimum(level * size if norm == L2.norm else level, room)
    return torch.where(w == 0, 0, torch.where(falls, -move, move))


def _ratio(room: Tensor, size: Tensor) -> Tensor:
    """room / |w|, finite: a coordinate that cannot move the gap has its kink at 0."""
    ratio = torch.where(size > 0, room / size, 0)
    return ratio.clamp(max=torch.finfo(room.dtype).max)


def _level(weight: Tensor, kink: Tensor, full: Tensor, gap: Tensor) -> Tensor:
    """The t where sum_i weight_i * min(t, kink_i) = gap, or infinity if none is large enough.

    full = weight * kink, given because it is finite where the product would not be.
    """
    ends, order = kink.sort(1)
    upto = full.gather(1, order).cumsum(1)
    beyond = F.pad(weight.gather(1, order).flip(1).cumsum(1).flip(1)[:, 1:], (0, 1))
    passed = (upto + ends * beyond < gap[:, None]).sum(1)
    out_of_reach = passed == weight.shape[1]
    first_free = ends.gather(1, passed.clamp(max=weight.shape[1] - 1)[:, None])
    # Summed anew over the coordinates that are or are not at their kink: running sums round worse.
    stuck = kink < first_free
    left = gap - torch.where(stuck, full, 0).sum(1)
    slope = torch.where(stuck, 0, weight).sum(1)
    level = (left / slope.clamp_min(torch.finfo(gap.dtype).tiny)).clamp_min(0)
    return torch.where(out_of_reach, torch.inf, level)
