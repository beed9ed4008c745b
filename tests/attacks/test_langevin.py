"""The noisy walk against PGD, a loop in plain Python, and the law it must settle in."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from attack_cases import Make, gen_for, wrong
from torch import Tensor, nn

from flatrock.attacks.catalog import ATTACKS, attack, describe
from flatrock.attacks.craft import craft
from flatrock.attacks.langevin import Langevin
from flatrock.attacks.losses import cross_entropy
from flatrock.attacks.pgd import Aim, pgd
from flatrock.core.errors import ConfigError
from flatrock.core.rng import SampleGen
from flatrock.core.threat import L2, Linf, Threat
from flatrock.core.types import Attack, PathAttack
from flatrock.evaluation.evaluate import evaluate


def corner(x: Tensor, threat: Threat, gen: SampleGen) -> Tensor:
    normal = gen.child("start").normal(x)
    if threat.norm == "linf":
        return (x + threat.eps * normal.sign()).clamp(0, 1)
    length = normal.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
    return (x + threat.eps * normal / length).clamp(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_noise_and_pull_it_is_pgd_bit_by_bit(
    dtype: torch.dtype, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(dtype=dtype), images(dtype=dtype)
    y, gen = right_labels(model, x), gen_for(x)
    chosen = Langevin(steps=5, noise=0, gamma=0, project="every", average=0.5)
    aim = Aim(model, cross_entropy, y, y)
    start = threat.eps * threat.ascent(gen.child("start").normal(x))
    for steps, point in enumerate(chosen.path(model, x, y, threat, gen), 1):
        expected = pgd(
            aim, x, threat, steps=steps, step_size=threat.default_step, start=(x + start).clamp(0, 1), early_stop=False
        )
        assert torch.equal(point.x_adv, expected)


@pytest.mark.parametrize("project", ["every", "last", "never"])
@pytest.mark.parametrize("drift", ["code", "paper"])
def test_every_step_equals_a_loop(
    drift: str, project: str, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images(16)
    y, gen = right_labels(model, x), gen_for(x)
    eta, c, gamma = 0.01, 0.05, 0.2
    chosen = Langevin(steps=4, step_size=eta, noise=c, gamma=gamma, drift=drift, project=project)
    x_adv = corner(x, threat, gen)
    for k, point in enumerate(chosen.path(model, x, y, threat, gen), 1):
        probe = x_adv.clone().requires_grad_(True)
        (g,) = torch.autograd.grad(nn.functional.cross_entropy(model(probe), y, reduction="sum"), probe)
        noise = math.sqrt(2 * eta) * c * gen.child("noise", k).normal(x)
        if drift == "paper":
            x_adv = x_adv + eta * (g + gamma * (x - x_adv)) + noise
        else:
            unit = g.sign() if threat.norm == "linf" else g / g.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
            x_adv = x_adv + eta * unit + gamma * (x - x_adv) + noise
        if project == "every" or (project == "last" and k == 4):
            delta = x_adv - x
            if threat.norm == "linf":
                delta = delta.clamp(-threat.eps, threat.eps)
            else:
                delta = delta * (threat.eps / delta.flatten(1).norm(dim=1)).clamp(max=1).reshape(-1, 1, 1, 1)
            x_adv = x + delta
        x_adv = x_adv.clamp(0, 1)
        torch.testing.assert_close(point.x_adv, x_adv, rtol=1e-12, atol=1e-12)


class Bowl(nn.Module):
    """Two logits whose cross-entropy at class 0 is 5 - k/2 * ||x - a||^2."""

    def __init__(self, k: float, a: float) -> None:
        super().__init__()
        self.k, self.a = k, a

    def forward(self, x: Tensor) -> Tensor:
        loss = 5 - self.k / 2 * (x - self.a).square().sum(1, keepdim=True)
        return torch.cat([-loss, torch.log1p(-torch.exp(-loss))], 1)


@pytest.mark.parametrize(("gamma", "eta"), [(2.0, 0.1), (2.0, 0.02), (0.0, 0.2)])
def test_the_walk_settles_in_the_gaussian_of_a_quadratic_loss(gamma: float, eta: float) -> None:
    """Precision P = gamma + k, mean (gamma * x + k * a) / P, variance c^2 / (P * (1 - eta * P / 2))."""
    k, a, at, c, n = 3.0, 0.6, 0.45, 0.05, 20_000
    x, y = torch.full((n, 1), at, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)
    steps = math.ceil(math.log(1e-9) / math.log(1 - eta * (gamma + k)))
    chosen = Langevin(steps=steps, step_size=eta, noise=c, gamma=gamma, drift="paper", project="never", start="zero")
    found = chosen(Bowl(k, a), x, y, Linf(1.0), gen_for(x)).squeeze(1)
    precision = gamma + k
    mean, variance = (gamma * at + k * a) / precision, c**2 / (precision * (1 - eta * precision / 2))
    assert abs(float(found.mean()) - mean) < 5 * math.sqrt(variance / n)
    assert abs(float(found.var()) - variance) < 5 * variance * math.sqrt(2 / n)
    assert float(found.min()) > 0, "the box must stay out of reach"
    assert float(found.max()) < 1, "the box must stay out of reach"


@pytest.mark.parametrize(
    ("eta", "std"), [(0.02175, 0.1203), (0.02, 0.1154), (0.5 * 0.435 / 20, 0.0851)], ids=["paper", "0.02", "code"]
)
def test_noise_of_one_step_has_the_published_size(eta: float, std: float) -> None:
    """c = 0.577: 0.12 in the paper, 0.085 with the twenty steps of the released code."""
    x = torch.full((4000, 10), 0.5, dtype=torch.float64)
    chosen = Langevin(steps=1, step_size=eta, noise=0.577, gamma=0, project="never", start="zero")
    flat = Bowl(k=0.0, a=0.5)
    assert 0.577 * math.sqrt(2 * eta) == pytest.approx(std, abs=5e-5)
    moved = chosen(flat, x, torch.zeros(4000, dtype=torch.int64), L2(0.435), gen_for(x)) - x
    assert float(moved.std()) == pytest.approx(std, rel=0.02)
    assert float(moved.mean()) == pytest.approx(0, abs=5 * std / 200)


@pytest.mark.parametrize("drift", ["code", "paper"])
def test_zero_gradients_move_nothing(drift: str, threat: Threat) -> None:
    x = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    chosen = Langevin(steps=3, noise=0, start="zero", drift=drift)
    assert torch.equal(chosen(Bowl(0.0, 0.5), x, torch.zeros(6, dtype=torch.int64), threat, gen_for(x)), x)


def test_corner_start(images: Make) -> None:
    x = images() * 0.4 + 0.3
    y = torch.zeros(len(x), dtype=torch.int64)
    quiet = Langevin(steps=1, step_size=1e-15, noise=0, gamma=0)
    linf = quiet(nn.Flatten(), x, y, Linf(0.1), gen_for(x)) - x
    torch.testing.assert_close(linf.abs(), torch.full_like(x, 0.1))
    assert 0.45 < float((linf > 0).double().mean()) < 0.55
    sphere = quiet(nn.Flatten(), x, y, L2(0.25), gen_for(x)) - x
    torch.testing.assert_close(L2(0.25).size(sphere), torch.full((len(x),), 0.25, dtype=torch.float64))


def test_pull_holds_an_l2_walk_without_projection(conv_net: Make, images: Make, right_labels: Make) -> None:
    """The default pull of 0.05 settles where it balances the step: at 20 steps' length from x."""
    model, x = conv_net(), images()
    y, threat, eta = right_labels(model, x), L2(0.25), 0.01
    chosen = Langevin(steps=150, step_size=eta, noise=0, project="never")
    far = threat.size(chosen(model, x, y, threat, gen_for(x)) - x)
    free = threat.size(dataclasses.replace(chosen, gamma=0.0)(model, x, y, threat, gen_for(x)) - x)
    assert float(far.max()) <= eta / 0.05 + 1e-3
    assert float(free.max()) > 2 * eta / 0.05
    assert chosen.pull(Linf(0.1)) == 0
    assert chosen.pull(threat) == 0.05
    assert dataclasses.replace(chosen, gamma=0.0).pull(threat) == 0


def test_only_the_last_input_is_projected(conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x, threat = conv_net(), images(), Linf(0.02)
    y = right_labels(model, x)

    def sizes(project: str) -> list[float]:
        walk = Langevin(steps=4, step_size=0.01, project=project).path(model, x, y, threat, gen_for(x))
        assert all(float(p.x_adv.min()) >= 0 and float(p.x_adv.max()) <= 1 for p in walk)
        return [float(threat.size(p.x_adv - x).max()) for p in walk]

    every, last, never = sizes("every"), sizes("last"), sizes("never")
    assert max(every) <= 0.02 + 1e-12
    assert min(last[:-1]) > 0.025
    assert last[-1] <= 0.02 + 1e-12
    assert last[:-1] == never[:-1]
    assert never[-1] > 0.025
    assert [Langevin(project=p).bounded for p in ("every", "last", "never")] == [True, True, False]


@pytest.mark.parametrize("average", [0.9, 0.25])
def test_path_is_the_walk_with_the_weights_of_a_moving_average(
    average: float, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images(8)
    y, gen = right_labels(model, x), gen_for(x)
    chosen = Langevin(steps=6, average=average)
    walk = chosen.path(model, x, y, threat, gen)
    assert len(walk) == chosen.points == 6
    assert torch.equal(walk[-1].x_adv, chosen(model, x, y, threat, gen))
    loss = 0.0
    losses = [float(cross_entropy(model(p.x_adv), y).mean().detach()) for p in walk]
    for value in losses:
        loss = (1 - average) * loss + average * value
    assert sum(p.weight * v for p, v in zip(walk, losses, strict=True)) == pytest.approx(loss, rel=1e-12)
    assert sum(p.weight for p in walk) == pytest.approx(1 - (1 - average) ** 6, rel=1e-12)
    assert not any(p.x_adv.requires_grad for p in walk)


def test_average_one_trains_on_the_last_input_alone(conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images(8)
    y, chosen = right_labels(model, x), Langevin(steps=6, average=1.0)
    (point,) = chosen.path(model, x, y, Linf(0.03), gen_for(x))
    assert (point.weight, chosen.points) == (1.0, 1)
    assert torch.equal(point.x_adv, chosen(model, x, y, Linf(0.03), gen_for(x)))


def test_path_costs_no_more_than_the_walk(
    counting: Make, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = counting(conv_net()), images(8)
    y, chosen = right_labels(model.model, x), Langevin(steps=6)
    chosen.path(model, x, y, threat, gen_for(x))
    assert model.passes == chosen.passes(4) == 6


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("early_stop", [False, True])
def test_noise_belongs_to_the_sample_whatever_the_batch(
    early_stop: bool, batch: int, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images()
    y, gen, chosen = right_labels(model, x), gen_for(x), Langevin(steps=5, noise=0.05)
    whole = craft(chosen, model, x, y, threat, gen, early_stop=early_stop)
    for rows in torch.split(torch.arange(64), batch):
        piece = craft(chosen, model, x[rows], y[rows], threat, gen[rows], early_stop=early_stop)
        torch.testing.assert_close(piece, whole[rows], rtol=1e-12, atol=1e-12)
    assert not torch.equal(whole, craft(chosen, model, x, y, threat, gen.child("again"), early_stop=early_stop))


def test_rows_that_left_early_do_not_change_the_others(
    threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    """A sample keeps the first point inside the ball that broke it; the rest of the batch walks on as without it."""
    model, x = conv_net(), images()
    y, gen, chosen = right_labels(model, x), gen_for(x), Langevin(steps=16, noise=0.02, start="zero")
    walk = [x, *(point.x_adv for point in chosen.path(model, x, y, threat, gen))]
    early = craft(chosen, model, x, y, threat, gen, early_stop=True)
    left = torch.zeros(len(x), dtype=torch.bool)
    for x_adv in walk[:-1]:
        broken = wrong(model, x_adv, y) & (threat.size(x_adv - x) <= threat.eps) & ~left
        torch.testing.assert_close(early[broken], x_adv[broken], rtol=1e-12, atol=1e-12)
        left |= broken
    assert 0 < int(left.sum()) < len(x)
    assert float(threat.size(walk[-2] - x)[~left].max()) > threat.eps, "some had to walk on outside"
    torch.testing.assert_close(early[~left], walk[-1][~left], rtol=1e-12, atol=1e-12)


def test_a_point_outside_the_ball_never_ends_the_walk() -> None:
    """Everything beyond 0.1 from x is misclassified, nothing within: the walk ends inside and has broken nothing."""

    class Cliff(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            height = x.sum(1, keepdim=True) / x.shape[1] - 0.6 - 1e-9
            return torch.cat([-height, height], 1)

    x, y = torch.full((5, 4), 0.5, dtype=torch.float64), torch.zeros(5, dtype=torch.int64)
    chosen = Langevin(steps=10, step_size=0.05, noise=0, start="zero")
    walk = chosen.path(Cliff(), x, y, Linf(0.1), gen_for(x))
    assert bool(wrong(Cliff(), walk[-2].x_adv, y).all())
    x_adv = craft(chosen, Cliff(), x, y, Linf(0.1), gen_for(x), early_stop=True)
    torch.testing.assert_close(x_adv, x + 0.1)
    assert not bool(wrong(Cliff(), x_adv, y).any())


def test_it_is_an_attack_with_a_path() -> None:
    chosen: Attack = ATTACKS.make("langevin")
    assert isinstance(chosen, PathAttack)
    assert not isinstance(ATTACKS.make("pgd"), PathAttack)


def test_evaluation_names_every_option_and_refuses_to_leave_the_ball(
    conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images()
    y = right_labels(model, x)
    result = evaluate(model, x, y, L2(0.25), attacks=["langevin-20:step_size=0.003", "langevin"])
    assert result.attacks["langevin-20:step_size=0.003"]["step_size"] == 0.003
    options: dict[str, Any] = result.attacks["langevin"]
    assert options == describe(Langevin(), L2(0.25))
    assert (options["gamma"], options["step_size"], options["steps"]) == (0.05, L2(0.25).default_step, 10)
    assert result.robust < 1
    with pytest.raises(
        ConfigError, match=r"'langevin:project=never': .*leaves the ball with project=never, .*use project=last"
    ):
        evaluate(model, x, y, L2(0.25), attacks=["langevin:project=never"])
    with pytest.raises(ConfigError, match="leaves the ball with project=never"):
        attack("langevin", model, x, y, L2(0.25), project="never")
    assert not ATTACKS.make("langevin", project="never").bounded  # type: ignore[attr-defined]
