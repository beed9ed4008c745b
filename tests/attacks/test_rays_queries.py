"""RayS asks, query by query, what a plain loop over one sample asks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from attack_cases import Make, Recorder, rays_distance
from torch import Tensor, nn

from flatrock.attacks.pgd import safely_broken
from flatrock.attacks.rays import follow_rays


class Spent(Exception):
    """No query is left."""


@dataclass
class Naive:
    """RayS for one sample, with loops; radii along unit vectors of the L2 norm, as in the paper."""

    model: nn.Module
    x: Tensor
    y: int
    queries: int
    tolerance: float = 1e-3
    leave_within: float | None = None
    asked: list[Tensor] = field(default_factory=list)
    radius: float = math.inf

    def __post_init__(self) -> None:
        self.signs = torch.ones(self.x.numel(), dtype=torch.float64)
        self.pending: tuple[float, Tensor] | None = None
        try:
            if self.changes(self.signs, 0.0):
                self.radius = 0.0
            else:
                self.go_through_blocks()
        except Spent:
            if self.pending is not None and self.pending[0] < self.radius:
                self.radius, self.signs = self.pending

    def point(self, signs: Tensor, radius: float) -> Tensor:
        step = min(radius / math.sqrt(len(signs)), 1.0)
        return (self.x + step * signs.reshape(self.x.shape)).clamp(0, 1)

    def changes(self, signs: Tensor, radius: float) -> bool:
        if len(self.asked) == self.queries:
            raise Spent
        point = self.point(signs, radius)
        self.asked.append(point)
        logits = self.model(point[None])
        near = self.leave_within is not None and float((point - self.x).abs().max()) <= self.leave_within
        if radius > 0 and near and bool(safely_broken(logits, torch.tensor([self.y]))):
            self.radius, self.signs, self.pending = radius, signs, None
            raise Spent
        return int(logits.argmax(1)) != self.y

    def go_through_blocks(self) -> None:
        level, d = 0, len(self.signs)
        if self.changes(self.signs, self.radius):
            self.bisect(self.signs)
        while True:
            size = math.ceil(d / 2**level)
            for begin in range(0, d, size):
                flipped = self.signs.clone()
                flipped[begin : begin + size] *= -1
                if self.changes(flipped, self.radius):
                    self.bisect(flipped)
            level += 1

    def bisect(self, signs: Tensor) -> None:
        low, high = 0.0, min(self.radius, math.sqrt(len(signs)))
        while True:
            self.pending = high, signs
            middle = (low + high) / 2
            if self.changes(signs, middle):
                high = middle
            else:
                low = middle
            if high - low <= self.tolerance:
                break
        self.pending = None
        if high < self.radius:
            self.radius, self.signs = high, signs

    @property
    def nearest(self) -> Tensor:
        return self.point(self.signs, self.radius)


@pytest.mark.parametrize("queries", [1, 2, 3, 20, 100, 300])
def test_every_query_is_that_of_a_plain_loop(queries: int, conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = Recorder(conv_net()), images(10)
    y = right_labels(model.model, x)
    found = rays_distance(model, x, y, queries=queries)
    assert len(model.seen) == queries
    assert found.queries.tolist() == [queries] * 10
    for i in range(10):
        naive = Naive(model.model, x[i], int(y[i]), queries)
        torch.testing.assert_close(
            torch.stack([s[i] for s in model.seen]), torch.stack(naive.asked), rtol=0, atol=1e-12
        )
        torch.testing.assert_close(found.points[i], naive.nearest, rtol=0, atol=1e-12)


@pytest.mark.parametrize("eps", [0.1, 0.2])
def test_early_stop_leaves_when_a_plain_loop_does(eps: float, conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images(16)
    y = right_labels(model, x)
    y[::5] = (y[::5] + 1) % 4
    points, radius, used = follow_rays(model, x, y, queries=120, leave_within=eps)
    for i in range(16):
        naive = Naive(model, x[i], int(y[i]), 120, leave_within=eps)
        assert int(used[i]) == len(naive.asked)
        assert float(radius[i]) == pytest.approx(naive.radius / math.sqrt(72), abs=1e-12)
        torch.testing.assert_close(points[i], naive.nearest, rtol=0, atol=1e-12)
    assert used[::5].tolist() == [1] * 4
    assert len(used.unique()) > 4, "samples leave one by one"
    assert bool((used < 120).any())
