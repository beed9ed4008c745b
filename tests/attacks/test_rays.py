"""RayS: the known optimum of a linear model, distances for ADBD, and who leaves when."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from attack_cases import Make, Recorder, gen_for, gpu_waits, rays_distance, wrong
from torch import Tensor, nn

from flatrock.attacks.catalog import attack, parse_attack
from flatrock.attacks.craft import craft
from flatrock.attacks.pgd import safely_broken
from flatrock.attacks.rays import BLOCK, RayS, block_sizes, follow_rays
from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.core.threat import L2, Linf


def test_blocks_of_all_levels() -> None:
    assert block_sizes(1) == [1]
    assert block_sizes(2) == [2, 1]
    assert block_sizes(5) == [5, 3, 2, 1]
    assert block_sizes(8) == [8, 4, 2, 1]
    assert block_sizes(3072) == [3072, 1536, 768, 384, 192, 96, 48, 24, 12, 6, 3, 2, 1]


class Never(nn.Module):
    """Always class 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x.flatten(1).sum(1) + 1, torch.zeros(len(x), dtype=x.dtype)], 1)


def test_levels_beyond_single_coordinates_repeat_them() -> None:
    """Where nothing breaks, every query is the corner of the box with one block of it flipped."""
    model, x = Recorder(Never()), torch.full((2, 5), 0.25, dtype=torch.float64)
    found = rays_distance(model, x, torch.zeros(2, dtype=torch.int64), queries=1 + 1 + 6 + 17)
    blocks = [(s[0] == 0).nonzero().flatten().tolist() for s in model.seen[1:]]
    singles = [[0], [1], [2], [3], [4]]
    assert blocks[:7] == [[], [0, 1, 2, 3, 4], [0, 1, 2], [3, 4], [0, 1], [2, 3], [4]]
    assert blocks[7:] == [*singles, *singles, *singles, *singles][:17]
    assert torch.equal(found.points, torch.ones_like(x))
    assert found.distances.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("dimension", [1, 2, 12, 60])
def test_the_optimum_of_a_linear_model(dimension: int) -> None:
    gen = Seed(dimension).generator()
    model = nn.Linear(dimension, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, dimension, generator=gen))
        model.bias.copy_(-0.5 * model.weight.sum(1))
    x = 0.5 + 0.4 * (torch.rand(30, dimension, generator=gen, dtype=torch.float64) - 0.5)
    logits = model(x).detach()
    y = logits.argmax(1)
    push = (model.weight[1] - model.weight[0]).detach().abs().sum()
    optimum = (logits[:, 0] - logits[:, 1]).abs() / push
    assert float(optimum.max()) < 0.3, "the box must stay out of reach"
    queries = 250 + 30 * dimension
    found = rays_distance(model, x, y, queries=queries)
    assert bool((found.distances >= optimum - 1e-12).all())
    # A search may miss by the tolerance, and flips that are worth less than it may be left.
    assert float((found.distances - optimum).max()) <= 2e-3 / math.sqrt(dimension)
    assert bool(wrong(model, found.points, y).all())
    torch.testing.assert_close((found.points - x).abs().amax(1), found.distances, rtol=0, atol=1e-15)
    fine = rays_distance(model, x, y, queries=queries, tolerance=1e-6)
    assert float((fine.distances - optimum).max()) <= 2e-6 / math.sqrt(dimension)


def test_adbd_counts_wrong_inputs_as_zero(conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images(12)
    y = right_labels(model, x)
    right = rays_distance(model, x, y, queries=200)
    y[:6] = (y[:6] + 1) % 4
    half = rays_distance(model, x, y, queries=200)
    assert half.distances[:6].tolist() == [0.0] * 6
    assert torch.equal(half.points[:6], x[:6])
    assert half.queries.tolist() == [1] * 6 + [200] * 6
    torch.testing.assert_close(half.distances[6:], right.distances[6:], rtol=0, atol=1e-12)
    assert float(half.distances.mean()) == pytest.approx(float(right.distances[6:].sum()) / 12)
    assert bool((right.distances > 0).all())


def test_more_queries_only_come_nearer(conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images(20)
    y = right_labels(model, x)
    radii = [follow_rays(model, x, y, queries=queries)[1].detach() for queries in (2, 40, 200, 400)]
    for before, after in pairwise(radii):
        assert bool((after <= before).all())
    assert float(radii[-1].mean()) < float(radii[1].mean())


def test_the_attack_keeps_what_lies_in_the_ball(conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images(40)
    y = right_labels(model, x)
    found = rays_distance(model, x, y, queries=150)
    eps = float(found.distances.median()) + 1e-9
    x_adv = attack("rays", model, x, y, Linf(eps), queries=150)
    near = found.distances <= eps
    assert 0 < int(near.sum()) < 40
    torch.testing.assert_close(x_adv[near], found.points[near], rtol=0, atol=1e-12)
    assert torch.equal(x_adv[~near], x[~near])
    assert torch.equal(wrong(model, x_adv, y), near)


def test_a_corner_that_breaks_nothing_is_not_returned() -> None:
    x, y = torch.full((3, 4), 0.5), torch.zeros(3, dtype=torch.int64)
    assert torch.equal(attack("rays", Never(), x, y, Linf(1.0), queries=10), x)


def test_early_stop_saves_queries(counting: Make, conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = counting(conv_net()), images()
    y = right_labels(model.model, x)
    chosen = RayS(queries=150)
    plain = craft(chosen, model, x, y, Linf(0.03), gen_for(x))
    assert (model.passes, model.samples) == (150, 150 * 64)
    model.passes = model.samples = 0
    early = craft(chosen, model, x, y, Linf(0.03), gen_for(x), early_stop=True)
    assert model.passes <= chosen.passes(4) == 150
    assert model.samples < 150 * 64
    assert bool(wrong(model, early, y)[wrong(model, plain, y)].all())
    left = (early != x).flatten(1).any(1)
    assert bool(safely_broken(model(early[left]), y[left]).all())
    wrong_from_the_start = (y + 1) % 4
    model.passes = 0
    assert torch.equal(craft(chosen, model, x, wrong_from_the_start, Linf(0.03), gen_for(x)), x)
    assert model.passes == 1


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("early_stop", [False, True])
def test_samples_do_not_meet_in_a_batch(
    early_stop: bool, batch: int, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images()
    y, gen, chosen = right_labels(model, x), gen_for(x), RayS(queries=80)
    whole = craft(chosen, model, x, y, Linf(0.04), gen, early_stop=early_stop)
    pieces = [
        craft(chosen, model, x[rows], y[rows], Linf(0.04), gen[rows], early_stop=early_stop)
        for rows in torch.split(torch.arange(16 if batch == 1 else 64), batch)
    ]
    together = torch.cat(pieces)
    torch.testing.assert_close(together, whole[: len(together)], rtol=0, atol=1e-12)
    assert not torch.equal(whole, x)


@pytest.mark.parametrize("shape", [(2,), (1,), (3, 5), (1, 3, 4), (2, 2, 2, 3)])
def test_inputs_of_any_shape_in_float32(shape: tuple[int, ...]) -> None:
    gen, size = Seed(1).generator(), torch.Size(shape).numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(2, size, generator=gen))
        model[1].bias.copy_(-0.5 * model[1].weight.sum(1))
    x = 0.3 + 0.4 * torch.rand(20, *shape, generator=gen)
    found = rays_distance(model, x, model(x).argmax(1), queries=100)
    assert found.points.shape == x.shape
    assert found.points.dtype == found.distances.dtype == torch.float32
    assert float(found.distances.max()) < 0.5


def test_labels_alone_decide(conv_net: Make, images: Make, right_labels: Make) -> None:
    """Scores that are squeezed and shifted, with the same labels, change nothing."""
    model, x = conv_net(), images(12)
    y = right_labels(model, x)

    class Label(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.one_hot(model(x).argmax(1), 4).double()

    labels_only = rays_distance(Label(), x, y, queries=120)
    plain = rays_distance(model, x, y, queries=120)
    assert all(torch.equal(a, b) for a, b in zip(labels_only, plain, strict=True))


def test_an_empty_batch(conv_net: Make, images: Make) -> None:
    x, y = images(0), torch.zeros(0, dtype=torch.int64)
    assert craft(RayS(queries=3), conv_net(), x, y, Linf(0.1), gen_for(x)).shape == (0, 2, 6, 6)


def test_what_is_refused(conv_net: Make, images: Make) -> None:
    x, y = images(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ConfigError, match="'rays' measures linf distances, got l2; use 'square'"):
        attack("rays", conv_net(), x, y, L2(0.5))
    with pytest.raises(ConfigError, match="'rays' is not defined on mixed labels"):
        RayS()(conv_net(), x, torch.full((3, 4), 0.25, dtype=torch.float64), Linf(0.1), gen_for(x))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rays:queries=0", "rays queries must be a whole number >= 1, got 0"),
        ("rays:tolerance=0", "rays tolerance must be larger than 0"),
        ("rays:tolerance=-1", "rays tolerance must be a number >= 0, got -1"),
        ("rays:steps=5", "unknown option of attack 'rays': 'steps'; known: queries, tolerance"),
    ],
)
def test_options_that_cannot_be(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_attack(spec)
    assert parse_attack("rays") == ("rays", RayS(queries=10000, tolerance=1e-3))


@pytest.mark.gpu
def test_a_gpu_waits_once_per_block() -> None:
    model = nn.Linear(12, 3).cuda()
    x = torch.rand(8, 12, device="cuda")
    with torch.no_grad():
        y = model(x).argmax(1)
        waits = [
            gpu_waits(lambda blocks=blocks: follow_rays(model, x, y, queries=1 + blocks * BLOCK, leave_within=1e-3))
            for blocks in (1, 1, 2, 5)
        ]
    assert waits[2] - waits[1] == 1
    assert waits[3] - waits[1] == 4
