"""PGD under noise that both inputs share: against the loop of Blum et al. written out, alone and in training steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_cases import gen_for
from torch import Tensor, nn

from flatrock.attacks.catalog import ATTACKS, describe
from flatrock.attacks.craft import check_crafted
from flatrock.attacks.gradient import GradientAttack
from flatrock.attacks.smooth import SmoothPGD
from flatrock.core.errors import ConfigError
from flatrock.core.hooks import Flatness, Look, Penalty
from flatrock.core.rng import SampleGen, Seed, kept_global_rng
from flatrock.core.threat import L2, Linf, Threat
from flatrock.engine.job import Job
from flatrock.engine.step import train_step
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe

THREAT = L2(0.435)
SMALL = {"train.batch_size": 16, "data.limit": 16, "data.held_out": 20, "seed": 3}
SMOOTH = {"name": "smooth-pgd", "sigma": 0.25, "steps": 3, "step_size": 0.1}


def network() -> nn.Module:
    with kept_global_rng(seed=Seed(2)):
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4)).double()


def batch(n: int = 30) -> tuple[Tensor, Tensor]:
    gen = Seed(1).child("smooth").generator()
    return torch.rand(n, 6, dtype=torch.float64, generator=gen), torch.randint(4, (n,), generator=gen)


def divergence(clean: Tensor, adv: Tensor) -> Tensor:
    s = clean.softmax(1)
    return (s * (s.log() - adv.log_softmax(1))).sum(1)


# The attack


def test_the_search_of_blum_et_al_written_out() -> None:
    """L2, from 0.001 N, ten normalised steps of 2 eps/K, clipped to the box and then shrunk to the radius."""
    model, (x, y), gen = network(), batch(), gen_for(batch()[0])
    made = SmoothPGD(sigma=0.12, steps=10, step_size=2 * 0.435 / 10, box="first")
    got = made(model, x, y, THREAT, gen)
    noise = 0.12 * gen.child("noise").normal(x)
    clean = model(x + noise).detach()
    delta = 1e-3 * gen.child("restart", 0).normal(x)
    delta = (x + delta).clamp(0, 1) - x
    for _ in range(10):
        delta.requires_grad_(True)
        (grad,) = torch.autograd.grad(divergence(clean, model(x + delta + noise)).sum(), delta)
        delta = delta.detach() + 2 * 0.435 / 10 * grad / grad.norm(dim=1, keepdim=True)
        delta = (x + delta).clamp(0, 1) - x
        delta = delta * (0.435 / delta.norm(dim=1, keepdim=True)).clamp(max=1)
    torch.testing.assert_close(got, x + delta, rtol=0, atol=1e-12)
    with torch.no_grad():
        found, still = (float(divergence(clean, model(v + noise)).mean()) for v in (got, x))
    assert found > 1e-3 and still == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("threat", [Linf(0.1), THREAT], ids=["linf", "l2"])
@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_without_noise_it_is_pgd_bit_by_bit(threat: Threat, loss: str) -> None:
    model, (x, y), gen = network(), batch(), gen_for(batch()[0])
    plain = GradientAttack(loss=loss, steps=4, iterate="last", restarts=2)
    assert torch.equal(
        SmoothPGD(loss=loss, steps=4, sigma=0, restarts=2)(model, x, y, threat, gen), plain(model, x, y, threat, gen)
    )
    assert SmoothPGD(sigma=0).input_noise(x, gen) is None


@pytest.mark.parametrize("threat", [Linf(0.05), L2(0.3)], ids=["linf", "l2"])
def test_what_it_returns_has_no_noise_in_it_and_stays_in_ball_and_box(threat: Threat) -> None:
    model, (x, y) = network().float(), batch()
    x = x.float()
    made = SmoothPGD(sigma=0.5, steps=3)
    check_crafted(made(model, x, y, threat, gen_for(x)), x, threat, made)


def test_every_input_of_the_network_has_the_same_noise() -> None:
    model, (x, y), gen = network(), batch(), gen_for(batch()[0])
    made, seen = SmoothPGD(sigma=0.5, steps=3, start="zero", loss="ce"), []
    noise = made.input_noise(x, gen)
    assert noise is not None
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach() - noise))
    made(model, x, y, Linf(0.05), gen)
    torch.testing.assert_close(seen[0], x, rtol=0, atol=1e-15)
    assert all(float((point - x).abs().max()) <= 0.05 + 1e-12 for point in seen)
    assert float(noise.std()) == pytest.approx(0.5, rel=0.15)


def test_noise_belongs_to_samples() -> None:
    model, (x, y), gen = network(), batch(), gen_for(batch()[0])
    rows, made = torch.tensor([3, 17, 4]), SmoothPGD(steps=3, restarts=2)
    whole = made(model, x, y, THREAT, gen)
    torch.testing.assert_close(made(model, x[rows], y[rows], THREAT, gen[rows]), whole[rows], rtol=0, atol=1e-12)
    assert not torch.equal(made.input_noise(x, gen.child("again")), made.input_noise(x, gen))  # type: ignore[arg-type]


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize(("options", "passes"), [({}, 5), ({"loss": "ce"}, 4), ({"restarts": 2, "eot": 3}, 33)])
def test_every_step_is_made_for_every_sample(options: dict[str, Any], passes: int, early_stop: bool) -> None:
    model, (x, y), rows = network(), batch(), []
    model.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    made = SmoothPGD(steps=4, **options)
    made(model, x, y, L2(2.0), gen_for(x), early_stop=early_stop)
    assert rows == [30] * passes
    assert made.passes(4) == passes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": -0.1}, "smooth-pgd sigma must be a number >= 0, got -0.1"),
        ({"sigma": 30}, r"smooth-pgd sigma must be at most 1, got 30; .* write 30/255"),
        ({"iterate": "any"}, "smooth-pgd iterate must be 'last', got 'any': .*leave it out"),
        ({"start": "zero"}, "loss 'kl' has zero gradient at the clean input"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ATTACKS.make("smooth-pgd", **options)


def test_it_says_what_it_is() -> None:
    told = describe(ATTACKS.make("smooth-pgd", steps=7), THREAT)
    assert (told["kind"], told["loss"], told["sigma"], told["iterate"], told["steps"]) == (
        "SmoothPGD",
        "kl",
        0.12,
        "last",
        7,
    )


# Training steps


def job_of(recipe: str, tmp_path: Path, attack: dict[str, Any], **keys: Any) -> Job:
    return build_job(load_recipe(recipe, {**SMALL, "attack": attack, "optimizer.lr": 0.0, **keys}), folder=tmp_path)


def drawn(job: Job) -> tuple[Tensor, Tensor, SampleGen]:
    """The first batch and the random numbers of its attack."""
    (first,) = [batch for _, batch in zip(range(1), job.loader.epoch(0), strict=False)]
    return first.x, first.y, job.seed.child("attack", 0).samples(first.ids)


def one_step(job: Job) -> dict[str, float]:
    job.model.train()
    return {k: float(v) for k, v in train_step(job, next(iter(job.loader.epoch(0))), step=0, guard=True).losses.items()}


@pytest.mark.parametrize(("recipe", "loss"), [("digits_trades_l2", "kl"), ("digits_at_l2", "ce")])
def test_the_loss_and_its_gradient_are_under_the_noise_of_the_attack(recipe: str, loss: str, tmp_path: Path) -> None:
    """CE(x + eta) + beta KL(x + eta || x' + eta) of TRADES, CE(x' + eta) of AT, with x' found under eta."""
    job = job_of(recipe, tmp_path, {**SMOOTH, "loss": loss})
    x, y, gen = drawn(job)
    attack = SmoothPGD(loss=loss, sigma=0.25, steps=3, step_size=0.1)
    model = copy.deepcopy(job.model)
    x_adv = attack(copy.deepcopy(model).eval(), x, y, job.threat, gen)
    noise = 0.25 * gen.child("noise").normal(x)
    model.train()
    if loss == "kl":
        clean, adv = model(x + noise), model(x_adv + noise)
        total = F.cross_entropy(clean, y) + 6 * divergence(clean, adv).mean()
    else:
        total = F.cross_entropy(model(x_adv + noise), y)
    total.backward()
    losses = one_step(job)
    assert losses["total"] == pytest.approx(float(total.detach()), rel=1e-5)
    for ours, theirs in zip(job.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_no_noise_trains_as_pgd_does(tmp_path: Path) -> None:
    ways = ({**SMOOTH, "sigma": 0}, {"name": "kl-pgd", "steps": 3, "step_size": 0.1})
    jobs = [job_of("digits_trades_l2", tmp_path, way, **{"optimizer.lr": 0.1}) for way in ways]
    losses = [one_step(job) for job in jobs]
    assert losses[0] == losses[1]
    pairs = zip(jobs[0].model.state_dict().values(), jobs[1].model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_ascent_of_awp_sees_the_same_noise(tmp_path: Path) -> None:
    job = job_of("digits_trades_l2", tmp_path, SMOOTH, flatness=[{"name": "awp", "gamma": 0.01}])
    x, _, gen = drawn(job)
    seen: list[Tensor] = []
    first = next(m for m in job.model.modules() if isinstance(m, nn.Conv2d))
    first.register_forward_hook(lambda m, given, _: seen.append(given[0].detach().clone()) if m.training else None)
    one_step(job)
    noisy = x + 0.25 * gen.child("noise").normal(x)
    assert len(seen) == 4
    assert torch.equal(seen[0], noisy) and torch.equal(seen[2], noisy)
    assert torch.equal(seen[1], seen[3]) and not torch.equal(seen[1], noisy)


class Spy(Flatness):
    """Keeps what it is shown."""

    looks: list[Look]

    def in_loss(self, look: Look) -> Penalty | None:
        self.looks = [look]
        return None


def test_methods_are_shown_what_the_network_saw(tmp_path: Path) -> None:
    spy = Spy()
    job = replace(job_of("digits_trades_l2", tmp_path, SMOOTH), flatness={"spy": spy})
    x, _, gen = drawn(job)
    one_step(job)
    noise = 0.25 * gen.child("noise").normal(x)
    assert torch.equal(spy.looks[0].x, x + noise)
    assert float(job.threat.size(spy.looks[0].x_adv - noise - x).max()) <= job.threat.eps + 1e-5
