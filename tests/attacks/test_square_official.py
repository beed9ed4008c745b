"""Square against the official code: the same schedule and patterns, and the same walk for the same draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attack_cases import gen_for, gpu_waits, wrong
from pyautoattack.square import SquareAttack
from torch import Tensor, nn

from flatrock.attacks.catalog import attack
from flatrock.attacks.losses import margin
from flatrock.attacks.square import BLOCK, search, squares_for
from flatrock.attacks.square_l2 import eta, nested
from flatrock.attacks.square_windows import LinfSquares, fraction, side_length, signs, window
from flatrock.core.rng import SampleGen, Seed, kept_global_rng
from flatrock.core.threat import L2, Linf, Threat

PEER_NORM = {"linf": "Linf", "l2": "L2"}


@pytest.fixture
def in_float64() -> Iterator[None]:
    """The official code makes its tensors in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Schedule, windows, patterns


def test_fractions_equal_the_official_ones() -> None:
    peer = SquareAttack(None, p_init=0.8, n_queries=5000, resc_schedule=False)
    assert [fraction(i, 0.8) for i in range(9000)] == [peer.p_selection(i) for i in range(9000)]


def test_side_lengths_on_cifar() -> None:
    first = [0, 11, 51, 201, 501, 1001, 2001, 4001]
    sides = [side_length(fraction(i, 0.8), 32, 32, "linf") for i in first]
    assert sides == [29, 20, 14, 10, 7, 5, 4, 3]
    assert [side_length(fraction(i - 1, 0.8), 32, 32, "linf") for i in first[1:]] == sides[:-1]
    assert [side_length(fraction(i, 0.8), 32, 32, "l2") for i in first] == [29, 21, 15, 11, 7, 5, 5, 3]


@pytest.mark.parametrize(
    ("p", "height", "width", "linf", "l2"),
    [
        (0.8, 6, 20, 6, 6),
        (0.1, 6, 20, 3, 3),
        (1e-4, 6, 20, 1, 3),
        (1.0, 2, 9, 2, 2),
        (0.8, 1, 10, 8, 8),
        (0.4, 1, 2, 1, 2),
        (1e-4, 1, 10, 1, 3),
        (1.0, 1, 10, 10, 10),
    ],
)
def test_sides_of_other_shapes(p: float, height: int, width: int, linf: int, l2: int) -> None:
    assert side_length(p, height, width, "linf") == linf
    assert side_length(p, height, width, "l2") == l2


@pytest.mark.parametrize(("side", "height", "width"), [(3, 7, 7), (2, 5, 9), (4, 4, 6), (3, 1, 8), (5, 1, 5)])
def test_windows_reach_every_place_alike(side: int, height: int, width: int) -> None:
    tall = min(side, height)
    down, across = height - tall + 1, width - side + 1
    grid = torch.cartesian_prod(*((torch.arange(4 * n).double() + 0.5) / (4 * n) for n in (down, across)))
    place = window(grid, side, height, width)
    assert bool((place.inside.sum((1, 2, 3)) == tall * side).all())
    corners = place.inside[:, 0].flatten(1).int().argmax(1)
    assert corners.unique().tolist() == [r * width + c for r in range(down) for c in range(across)]
    assert corners.unique(return_counts=True)[1].unique().tolist() == [16]
    last = window(torch.full((1, 2), 1 - 2.0**-24, dtype=torch.float64), side, height, width)
    assert bool(last.inside[0, 0, -1, -1])


def test_a_block_of_proposals_paints_one_window_after_the_other() -> None:
    """Windows of several sizes, computed together, are those `window` gives one by one."""
    gen = Seed(5).generator()
    x, best = (torch.rand(6, 3, 7, 9, generator=gen) for _ in range(2))
    u = torch.rand(6, 5, 5, generator=gen, dtype=torch.float64)
    fractions = [0.8, 0.4, 0.2, 0.05, 0.001]
    propose = LinfSquares(0.1).proposals(x, u, fractions)
    for i, p in enumerate(fractions):
        inside = window(u[:, i, :2], side_length(p, 7, 9, "linf"), 7, 9).inside
        painted = (x + 0.1 * signs(u[:, i, 2:, None, None], x)).clamp(0, 1)
        assert torch.equal(propose(i, best), torch.where(inside, painted, best))


@pytest.mark.parametrize("side", [1, 2, 3, 5, 6, 9, 21, 45])
def test_patterns_equal_the_official_ones(side: int, in_float64: None) -> None:
    peer = SquareAttack(None, norm="L2", eps=1.0)
    peer.device = torch.device("cpu")
    with kept_global_rng(seed=Seed(0)):
        official = [peer.eta(side) for _ in range(12)]
    ours = eta(side)
    turns = [bool(torch.allclose(o, ours.T, rtol=0, atol=1e-10)) for o in official]
    same = [bool(torch.allclose(o, ours, rtol=0, atol=1e-10)) for o in official]
    assert all(t or s for t, s in zip(turns, same, strict=True))
    assert {*turns} == ({True} if side == 1 else {True, False})
    assert float(ours.norm()) == pytest.approx(1, abs=1e-12)
    for height, width in ((side, side), (side // 2, side), (side, 2 * side + 1)):
        torch.testing.assert_close(nested(height, width), peer.eta_rectangles(height, width), rtol=0, atol=1e-10)


# The official walk


class Scripted(SquareAttack):  # type: ignore[misc]
    """The official code for one sample, with our random numbers in the place of its own."""

    def __init__(self, model: nn.Module, threat: Threat, queries: int, gen: SampleGen) -> None:
        super().__init__(model, norm=PEER_NORM[threat.norm], eps=threat.eps, n_queries=queries - 1, resc_schedule=False)
        self.gen = gen

    def script(self, x: Tensor) -> None:
        """Everything the official code will ask for, in its order."""
        self.init_hyperparam(x)
        self.choices: list[Tensor] = []
        self.corners: list[Tensor] = []
        self.turns: list[Tensor] = []
        c, h = x.shape[1:3]
        start, squares = self.gen.child("start"), squares_for(Linf(0.1) if self.norm == "Linf" else L2(0.1))
        if self.norm == "Linf":
            self.choices.append(signs(start.uniform(x[:, :, :1]), x))
        else:
            n = h // (h // 5)
            sign = signs(start.child("signs").uniform(x.new_empty(1, c, n, n)), x)
            turn = start.child("turns").uniform(x.new_empty(1, 1, n, n)) < 0.5
            self.choices += [sign[:, :, i, j, None, None] for i in range(n) for j in range(n)]
            self.turns += list(turn.flatten())
        for begin in range(0, self.n_queries, BLOCK):
            for u in self.gen.child("block", begin).uniform(x.new_empty(1, BLOCK, squares.numbers(x)))[0]:
                self.corners += list(u[:2] if self.norm == "Linf" else u[:4])
                self.choices.append(signs(u[-c:, None, None], x))
                self.turns.append(u[-c - 1] < 0.5)

    def random_choice(self, shape: list[int]) -> Tensor:
        return self.choices.pop(0).reshape(shape)

    def random_int(self, low: int = 0, high: int = 1, shape: object = None) -> Tensor:
        # One more than asked for: the last place counts.
        return (self.corners.pop(0)[None] * (high + 1)).long()

    def eta(self, s: int) -> Tensor:
        pattern = eta(s)
        return pattern.T if self.turns.pop(0) else pattern


class Deep(nn.Module):
    """A smooth network on 2 x 10 x 10 images, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        gen = Seed(5).generator()
        self.first = torch.randn(200, 40, generator=gen, dtype=torch.float64) / 5
        self.second = torch.randn(40, 5, generator=gen, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x.flatten(1) - 0.5) @ self.first) @ self.second


@pytest.mark.parametrize("threat", [Linf(0.05), L2(0.8)], ids=["linf", "l2"])
def test_with_the_same_draws_the_walk_is_the_official_one(threat: Threat, in_float64: None) -> None:
    model, queries = Deep(), 100
    x = torch.rand(12, 2, 10, 10, generator=Seed(6).generator())
    y, gen = model(x).argmax(1), gen_for(x)
    ours, score, done = search(model, x, y, squares_for(threat), gen, queries=queries, early_stop=True)
    assert 0 < int(done.sum()) < 12
    for i in range(12):
        peer = Scripted(model, threat, queries, gen[torch.tensor([i])])
        peer.script(x[i : i + 1])
        used, theirs = peer.attack_single_run(x[i : i + 1], y[i : i + 1])
        torch.testing.assert_close(ours[i : i + 1], theirs, rtol=0, atol=1e-9)
        assert float(margin(model(theirs), y[i : i + 1])) == pytest.approx(float(score[i]), abs=1e-9)
        assert int(used) == queries or bool(done[i])


class LastPlace(SquareAttack):  # type: ignore[misc]
    """The official code, except that its windows may touch the last row and column."""

    def random_int(self, low: int = 0, high: int = 1, shape: tuple[int, ...] = (1,)) -> Tensor:
        drawn: Tensor = super().random_int(low, high + 1, shape)
        return drawn


@pytest.mark.parametrize("threat", [Linf(0.2), L2(1.0)], ids=["linf", "l2"])
def test_as_strong_as_the_official_code_on_a_trained_network(
    threat: Threat, digits: Any, digits_model: nn.Module
) -> None:
    """One window for all or one for each: only chance differs. In 8x8 images the last place matters, so it is given."""
    x, y = digits.test_x[:80], digits.test_y[:80]
    peer = LastPlace(digits_model, norm=PEER_NORM[threat.norm], eps=threat.eps, n_queries=149, resc_schedule=False)
    with kept_global_rng(seed=Seed(0).child("peer")):
        theirs = peer.perturb(x, y)
    ours = attack("square", digits_model, x, y, threat, queries=150)
    broken = [float(wrong(digits_model, x_adv, y).double().mean()) for x_adv in (ours, theirs)]
    assert 0.2 < broken[0] < 0.8
    assert abs(broken[0] - broken[1]) <= 0.08, broken


@pytest.mark.gpu
@pytest.mark.parametrize("threat", [Linf(1e-3), L2(1e-3)], ids=["linf", "l2"])
def test_a_gpu_waits_once_per_block(threat: Threat) -> None:
    model = Deep()
    x = torch.rand(8, 2, 10, 10, dtype=torch.float64, generator=Seed(6).generator()).cuda()
    model.first, model.second = model.first.cuda(), model.second.cuda()
    y, gen, squares = model(x).argmax(1), Seed(0).samples(torch.arange(8, device="cuda")), squares_for(threat)

    def walk(blocks: int) -> Tensor:
        return search(model, x, y, squares, gen, queries=1 + blocks * BLOCK, early_stop=True)[0]

    for blocks in (1, 2, 5):  # the windows each length asks for are made once
        walk(blocks)
    waits = {blocks: gpu_waits(lambda blocks=blocks: walk(blocks)) for blocks in (1, 2, 5)}
    assert waits[2] - waits[1] == 1
    assert waits[5] - waits[1] == 4
