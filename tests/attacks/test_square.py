"""Square: a margin that never falls, windows of one's own, and inputs of any shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attack_cases import Make, Recorder, gen_for, wrong
from torch import Tensor, nn

from flatrock.attacks.catalog import attack, parse_attack
from flatrock.attacks.craft import craft
from flatrock.attacks.losses import margin
from flatrock.attacks.pgd import safely_broken
from flatrock.attacks.square import BLOCK, Square, as_images, look, search, squares_for
from flatrock.attacks.square_windows import fraction, side_length
from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf, Threat

# The search


def test_the_best_margin_never_falls_and_every_point_is_allowed(
    threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = Recorder(conv_net()), images()
    y = right_labels(model.model, x)
    x_adv = craft(Square(queries=50), model, x, y, threat, gen_for(x))
    assert len(model.seen) == 51
    for tried in model.seen:
        assert float(threat.size(tried - x).max()) <= threat.eps + 1e-12
        assert float(tried.min()) >= 0
        assert float(tried.max()) <= 1
    margins = torch.stack([margin(model.model(tried), y) for tried in model.seen]).detach()
    torch.testing.assert_close(margin(model.model(x_adv), y).detach(), margins.amax(0), rtol=0, atol=1e-12)
    best = torch.full_like(margins[0], -torch.inf)
    for queries in (1, 2, 10, 33, 50):
        _, score, _ = search(model, x, y, squares_for(threat), gen_for(x).child("restart", 0), queries=queries)
        torch.testing.assert_close(score, margins[1 : queries + 1].amax(0), rtol=0, atol=1e-12)
        assert bool((score >= best - 1e-12).all())
        best = score


def test_proposals_start_from_the_best_point(conv_net: Make, images: Make, right_labels: Make) -> None:
    """In Linf a proposal differs from the best point in one window only, where all of a channel moves one way."""
    model, x = Recorder(conv_net()), images()
    y, threat = right_labels(model.model, x), Linf(0.03)
    craft(Square(queries=30), model, x, y, threat, gen_for(x))
    best, score = model.seen[1], margin(model.model(model.seen[1]), y)
    for i, tried in enumerate(model.seen[2:]):
        side = side_length(fraction(i, 0.8), 6, 6, "linf")
        changed = (tried != best).any(1)
        assert int(changed.any(2).sum(1).max()) <= side
        assert int(changed.any(1).sum(1).max()) <= side
        push = (tried - best).flatten(2)
        assert bool(((push.amax(2) <= 0) | (push.amin(2) >= 0)).all())
        better = margin(model.model(tried), y) > score
        best = torch.where(better[:, None, None, None], tried, best)
        score = margin(model.model(best), y)


def test_a_proposal_that_is_only_as_good_is_not_taken(threat: Threat, images: Make) -> None:
    """A model that says the same everywhere leaves every sample at its random start."""
    x = images(8)
    y = torch.zeros(8, dtype=torch.int64)
    gen = gen_for(x)
    best, _, _ = search(
        lambda x: x.new_tensor([[1.0, 0.0]]).expand(len(x), 2), x, y, squares_for(threat), gen, queries=9
    )
    assert torch.equal(best, squares_for(threat).start(x, gen.child("start")))


def test_a_broken_sample_keeps_the_point_that_broke_it(
    threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = Recorder(conv_net()), images()
    y = right_labels(model.model, x)
    craft(Square(queries=80), model, x, y, threat, gen_for(x), early_stop=False)
    whole, model.seen = model.seen, []
    early = craft(Square(queries=80), model, x, y, threat, gen_for(x), early_stop=True)
    broken = torch.stack([safely_broken(model.model(tried), y) for tried in whole])
    first = broken.int().argmax(0)
    hit = broken.any(0).nonzero().squeeze(1)
    assert 5 < len(hit) < 64
    assert int((first[hit] > 3).sum()) > 0, "some break late"
    expected = torch.stack([whole[int(first[i])][i] for i in hit.tolist()])
    torch.testing.assert_close(early[hit], expected, rtol=0, atol=1e-12)
    sizes = [len(tried) for tried in model.seen]
    assert len(sizes) <= 81
    assert sorted(sizes, reverse=True) == sizes
    assert sizes[-1] < 64
    assert len({*sizes}) <= 2 + 80 // BLOCK + 1, "who is broken is asked once per block"


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_samples_do_not_meet_in_a_batch(
    batch: int, early_stop: bool, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images()
    y, gen, chosen = right_labels(model, x), gen_for(x), Square(queries=40)
    whole = craft(chosen, model, x, y, threat, gen, early_stop=early_stop)
    pieces = [
        craft(chosen, model, x[rows], y[rows], threat, gen[rows], early_stop=early_stop)
        for rows in torch.split(torch.arange(16 if batch == 1 else 64), batch)
    ]
    together = torch.cat(pieces)
    torch.testing.assert_close(together, whole[: len(together)], rtol=0, atol=1e-12)
    assert len({tuple((d != 0).flatten().tolist()) for d in whole - x}) > 32, "each sample has windows of its own"


def test_restarts_keep_the_worst_and_are_not_wasted_on_the_broken(
    threat: Threat, counting: Make, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = counting(conv_net()), images()
    y = right_labels(model.model, x)
    reached = []
    for restarts in (1, 2, 4):
        x_adv = craft(Square(queries=10, restarts=restarts), model, x, y, threat, gen_for(x))
        reached.append(margin(model.model(x_adv), y))
    assert bool((reached[1] >= reached[0]).all())
    assert bool((reached[2] >= reached[1]).all())
    assert bool((reached[2] > reached[0]).any())
    model.samples = 0
    craft(Square(queries=10, restarts=4), model, x, y, threat, gen_for(x), early_stop=True)
    assert model.samples < (1 + 4 * 10) * len(x)
    assert Square(queries=10, restarts=4).passes(4) == 41


# Odd cases


def test_wrong_samples_stay_as_they_are(threat: Threat, counting: Make, conv_net: Make, images: Make) -> None:
    model, x = counting(conv_net()), images()
    y = (model.model(x).argmax(1) + 1) % 4
    x_adv = craft(Square(queries=30), model, x, y, threat, gen_for(x), early_stop=True)
    assert torch.equal(x_adv, x)
    assert model.passes == 1
    kept = craft(Square(queries=1), model, x, y, threat, gen_for(x))
    assert bool((margin(model(kept), y) >= margin(model(x), y)).all())


def test_empty_batches(threat: Threat, conv_net: Make) -> None:
    x, y = torch.zeros(0, 2, 6, 6, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    for early_stop in (False, True):
        assert craft(Square(queries=5), conv_net(), x, y, threat, gen_for(x), early_stop=early_stop).shape == x.shape


@pytest.mark.parametrize(
    ("shape", "seen_as"),
    [
        ((2,), (1, 1, 2)),
        ((1,), (1, 1, 1)),
        ((13,), (1, 1, 13)),
        ((3, 7), (3, 1, 7)),
        ((2, 1, 6), (2, 1, 6)),
        ((1, 3, 3), (1, 3, 3)),
        ((3, 4, 11), (3, 4, 11)),
        ((1, 9, 2), (1, 9, 2)),
        ((2, 14, 14), (2, 14, 14)),
        ((2, 3, 6, 7), (6, 6, 7)),
    ],
)
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("norm", [Linf, L2])
def test_inputs_of_any_shape(
    norm: Callable[[float], Threat], classes: int, shape: tuple[int, ...], seen_as: tuple[int, ...]
) -> None:
    gen, size = Seed(1).generator(), torch.Size(shape).numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, classes)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(classes, size, generator=gen))
        model[1].bias.copy_(-0.5 * model[1].weight.sum(1))
    x = torch.rand(20, *shape, generator=gen, dtype=torch.float64)
    assert as_images(x).shape == (20, *seen_as)
    y, threat = model(x).argmax(1), norm(0.2)
    x_adv = attack("square", model, x, y, threat, queries=40)
    assert x_adv.shape == x.shape
    assert float(threat.size(x_adv - x).max()) <= 0.2 + 1e-12
    climbed = margin(model(x_adv), y) - margin(model(x), y)
    assert bool((climbed >= 0).all())
    assert int((climbed > 0.01).sum()) > 10


@pytest.mark.parametrize("norm", [Linf, L2])
def test_in_the_plane_the_best_direction_is_found(norm: Callable[[float], Threat]) -> None:
    """With windows of one or two coordinates L2 still turns to any angle, not only to axes and diagonals."""
    angles = torch.linspace(0, 6.2, 40, dtype=torch.float64)
    push = torch.stack([angles.cos(), angles.sin()], 1)
    x, y = torch.full((40, 2), 0.5, dtype=torch.float64), torch.zeros(40, dtype=torch.int64)
    threat = norm(0.1)
    best, score, _ = search(
        lambda z: torch.stack([torch.zeros(40, dtype=torch.float64), ((z.flatten(1) - 0.5) * push).sum(1)], 1),
        as_images(x),
        y,
        squares_for(threat),
        gen_for(x),
        queries=200,
    )
    optimum = 0.1 * (push.abs().sum(1) if threat.norm == "linf" else torch.ones(40, dtype=torch.float64))
    assert float((score / optimum).min()) > 0.995
    assert float((score / optimum).max()) <= 1 + 1e-9
    assert best.shape == (40, 1, 1, 2)


@pytest.mark.parametrize("eps", [128 / 255, 3.0])
def test_large_images_in_float32_stay_in_the_l2_ball(eps: float) -> None:
    gen = Seed(0).generator()
    with kept_global_rng(seed=Seed(0)):
        model = nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(3 * 7 * 7, 2))
    x = 0.5 + 0.3 * (torch.rand(2, 3, 224, 224, generator=gen) - 0.5)
    x_adv = attack("square", model, x, model(x).argmax(1), L2(eps), queries=5)
    assert eps * 0.99 < float(L2(eps).size(x_adv.double() - x.double()).max()) <= eps + 1e-6


class Steps(nn.Module):
    """A classifier without gradients, made under whatever grad mode it is called in."""

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        level = (x.flatten(1).mean(1) * 50).round()
        return torch.stack([25 - level, level - 25], 1)


def test_no_gradient_is_asked_for() -> None:
    x = 0.45 + 0.02 * torch.rand(8, 1, 6, 6, generator=Seed(0).generator())
    y = torch.zeros(8, dtype=torch.int64)
    x_adv = attack("square", Steps(), x, y, Linf(0.1), queries=60)
    assert bool(wrong(Steps(), x_adv, y).all())
    with torch.inference_mode():
        again = Square(queries=60)(Steps(), x, y, Linf(0.1), Seed(0).child("attack", "square").samples(torch.arange(8)))
    assert torch.equal(again, x_adv)


class Overflows(nn.Module):
    """Right, until the first pixel grows; then it has no answer."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.stack([torch.ones(len(x)), torch.zeros(len(x))], 1)
        return torch.where(x.flatten(1)[:, :1] > 0.55, torch.nan, z)


@pytest.mark.parametrize("early_stop", [False, True])
def test_no_answer_is_broken(early_stop: bool) -> None:
    x, y = torch.full((16, 1, 4, 4), 0.5), torch.zeros(16, dtype=torch.int64)
    score, done = look(Overflows(), x + 0.1, y, early_stop=True)
    assert bool(done.all())
    assert bool((score == torch.inf).all())
    x_adv = craft(Square(queries=40), Overflows(), x, y, Linf(0.1), gen_for(x), early_stop=early_stop)
    assert not bool(torch.isfinite(Overflows()(x_adv)).any())


# Options


def test_defaults_are_those_of_autoattack() -> None:
    assert parse_attack("square") == ("square", Square(queries=5000, p_init=0.8, restarts=1))
    assert parse_attack("square:queries=100:p_init=0.3") == (
        "square:queries=100:p_init=0.3",
        Square(queries=100, p_init=0.3),
    )
    assert Square().passes(10) == 5001


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("square:queries=0", "square queries must be a whole number >= 1, got 0"),
        ("square:queries=1.5", "square queries must be a whole number"),
        ("square:restarts=0", "square restarts must be a whole number >= 1, got 0"),
        ("square:p_init=0", r"square p_init must lie in \(0, 1\].*got 0"),
        ("square:p_init=1.5", r"square p_init must lie in \(0, 1\].*got 1.5"),
        ("square:p_init=abc", "square p_init must be a number >= 0, got 'abc'"),
        ("square:steps=5", "unknown option of attack 'square': 'steps'; known: p_init, queries, restarts"),
    ],
)
def test_options_that_cannot_be(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_attack(spec)


def test_mixed_labels_and_other_norms_are_refused(conv_net: Make, images: Make) -> None:
    x, soft = images(3), torch.full((3, 4), 0.25, dtype=torch.float64)
    with pytest.raises(ConfigError, match="'square' is not defined on mixed labels; use 'pgd' or 'kl-pgd'"):
        Square()(conv_net(), x, soft, Linf(0.1), gen_for(x))

    class L1(Linf):
        norm = "l1"

    with pytest.raises(ConfigError, match="'square' knows the norms linf and l2, got 'l1'; use 'pgd'"):
        Square()(conv_net(), x, torch.zeros(3, dtype=torch.int64), L1(0.1), gen_for(x))
