"""Fast adaptive boundary attack (Croce and Hein 2020): no radius is given, the nearest adversarial point is sought.

Each step replaces the network by its tangent at the current point, takes the nearest hyperplane on which a rival class
k ties with the true class y, and goes beyond it, a little drawn towards the clean input:

w, c = grad (z_k - z_y), z_k - z_y at x';  d1, d0 = shortest moves of x' and x onto <w, .> = <w, x'> - c in the box
a = min(||d1|| / (||d1|| + ||d0||), 0.1);  x' <- clip((1 - a) * (x' + 1.05 * d1) + a * (x + 1.05 * d0))

An x' that is misclassified is kept if it is the closest so far, and pulled back: x' <- x + 0.9 * (x' - x).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatrock.attacks.hyperplane import close_gap
from flatrock.attacks.pgd import classified_right, safely_broken, slope
from flatrock.core.threat import L2, TINY, Threat, rows

DRAW, OVERSHOOT, PULL_BACK = 0.1, 1.05, 0.9  # alpha_max, eta and beta of the paper
SMALLEST_MOVE = 1e-8
# Samples that are done leave the batch every so many steps: more often would make the host wait for the device.
TIDY_EVERY = 5


@dataclass(frozen=True)
class Found:
    """The closest adversarial point of each row, its distance (inf: none yet), and whether it ended the search."""

    points: Tensor
    distance: Tensor
    final: Tensor

    def __getitem__(self, keep: Tensor) -> Found:
        """The same for some of the rows."""
        return Found(self.points[keep], self.distance[keep], self.final[keep])

    def replaced(self, new: Found, where: Tensor) -> Found:
        """With the rows of `new` where the mask says so."""
        return Found(
            torch.where(rows(where, self.points), new.points, self.points),
            torch.where(where, new.distance, self.distance),
            self.final | (where & new.final),
        )

    def improved(self, new: Found) -> Found:
        """Row by row the closer of the two; one that ended the search comes before any that did not."""
        return self.replaced(
            new, (new.final & ~self.final) | ((new.final == self.final) & (new.distance < self.distance))
        )

    def put(self, at: Tensor, new: Found) -> Found:
        """With `new` in the rows numbered `at`."""
        points, distance, final = self.points.clone(), self.distance.clone(), self.final.clone()
        points[at], distance[at], final[at] = new.points, new.distance, new.final
        return Found(points, distance, final)


@dataclass(frozen=True)
class Walk:
    """Rows on their way: input, true class, rival classes [n, K], sample they belong to, point now, what was found."""

    x: Tensor
    y: Tensor
    rivals: Tensor
    group: Tensor
    point: Tensor
    found: Found

    def __getitem__(self, keep: Tensor) -> Walk:
        """The same for some of the rows."""
        return Walk(self.x[keep], self.y[keep], self.rivals[keep], self.group[keep], self.point[keep], self.found[keep])

    def open_rows(self, samples: int) -> Tensor:
        """Numbers of the rows whose sample has no final point yet."""
        hits = self.group.new_zeros(samples).scatter_reduce(0, self.group, self.found.final.long(), "amax")
        return (hits[self.group] == 0).nonzero().squeeze(1)


def nothing_found(x: Tensor) -> Found:
    """Before the search: the input itself, infinitely far."""
    return Found(x, x.new_full(x.shape[:1], torch.inf), torch.zeros_like(x.flatten(1)[:, 0], dtype=torch.bool))


def nearest_plane(model: nn.Module, x: Tensor, y: Tensor, rivals: Tensor, norm: str) -> tuple[Tensor, Tensor]:
    """w [n, D] and c [n] of the rival k with the smallest |c_k| / ||w_k||_q, q dual to the norm.

    One forward pass and a backward pass per rival. A coordinate whose slope is NaN stays where it is; zeros where every
    rival has an infinite one.
    """
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        logits = model(x)
        gaps = (logits.gather(1, rivals) - logits.gather(1, y[:, None])).to(x.dtype)  # logits may have another
        w = torch.zeros_like(x).flatten(1)
        gap, nearest = torch.zeros_like(gaps[:, 0]), torch.full_like(gaps[:, 0], torch.inf)
        for k in range(rivals.shape[1]):
            grad = slope(gaps[:, k].sum(), x, again=k + 1 < rivals.shape[1]).nan_to_num(0.0, torch.inf, -torch.inf)
            length = torch.linalg.vector_norm(grad.flatten(1), 2 if norm == L2.norm else 1, dim=1)
            distance = gaps[:, k].detach().abs() / (length + TINY)
            closer = (distance < nearest) & torch.isfinite(length)
            w = torch.where(closer[:, None], grad.flatten(1), w)
            gap = torch.where(closer, gaps[:, k].detach(), gap)
            nearest = torch.where(closer, distance, nearest)
    return w, gap


def beyond(x: Tensor, point: Tensor, w: Tensor, gap: Tensor, threat: Threat) -> Tensor:
    """Both points moved 1.05 times the way to the plane, mixed so that the nearer one to it counts more."""
    start, clean = point.flatten(1), x.flatten(1)
    clean_gap = gap + (w * (clean - start)).sum(1)
    d1, d0 = close_gap(torch.cat([start, clean]), torch.cat([w, w]), torch.cat([gap, clean_gap]), threat.norm).chunk(2)
    a1, a0 = threat.size(d1).clamp_min(SMALLEST_MOVE), threat.size(d0).clamp_min(SMALLEST_MOVE)
    alpha = (a1 / (a1 + a0)).clamp(max=DRAW)[:, None]
    mixed = (start + OVERSHOOT * d1) * (1 - alpha) + (clean + OVERSHOOT * d0) * alpha
    return mixed.clamp(0, 1).reshape(x.shape)


def advance(model: nn.Module, now: Walk, threat: Threat, *, early_stop: bool) -> Walk:
    """One step of every row. With early_stop a safely broken point inside the ball is final."""
    w, gap = nearest_plane(model, now.point, now.y, now.rivals, threat.norm)
    point = beyond(now.x, now.point, w, gap, threat)
    # No gradient is kept here for the next step: most steps end misclassified (7 to 9 of 10 on trained networks), and
    # those go on from the pulled back point. A backward pass through this one would mostly be thrown away.
    with torch.no_grad():
        logits = model(point)
    broken, distance = ~classified_right(logits, now.y), threat.size(point - now.x)
    final = safely_broken(logits, now.y) & (distance <= threat.eps) & early_stop
    better = broken & ~now.found.final & (final | (distance < now.found.distance))
    found = now.found.replaced(Found(point, distance, final), better)
    pulled = now.x + PULL_BACK * (point - now.x)
    return Walk(now.x, now.y, now.rivals, now.group, torch.where(rows(broken, point), pulled, point), found)


def fab(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rivals: Tensor,
    threat: Threat,
    *,
    steps: int,
    start: Tensor | None = None,
    group: Tensor | None = None,
    early_stop: bool = False,
) -> Found:
    """`steps` steps of every row towards the nearest of its rivals [n, K]; the closest adversarial point of each.

    The radius of the threat only matters to early_stop: a row leaves the batch once it is safely broken inside the
    ball, and with it all rows of the same `group` (numbers 0..n-1; by default every row is its own).
    Two forward passes and K backward passes per step.
    """
    samples = x.shape[0]
    live = torch.arange(samples, device=x.device)
    found = nothing_found(x)
    now = Walk(x, y, rivals, live if group is None else group, x if start is None else start, found)
    for step in range(steps):
        if early_stop and step and step % TIDY_EVERY == 0:
            keep = now.open_rows(samples)
            if keep.numel() < live.numel():
                found = found.put(live, now.found)
                live, now = live[keep], now[keep]
            if keep.numel() == 0:
                return found
        now = advance(model, now, threat, early_stop=early_stop)
    return found.put(live, now.found)
