"""Gaussian noise in the place of an attack: its law, whose numbers it uses, and that no evaluation may use it."""

from __future__ import annotations

import pytest
import torch
from attack_cases import gen_for
from torch import nn

from flatrock.attacks.catalog import ATTACKS, attack, describe, parse_attack
from flatrock.attacks.gaussian import Gaussian
from flatrock.core.errors import ConfigError
from flatrock.core.threat import L2
from flatrock.engine.step import train_step
from flatrock.evaluation.evaluate import evaluate
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe

THREAT = L2(0.1)
X = torch.linspace(0, 1, 40 * 500, dtype=torch.float64).reshape(40, 500)
Y = torch.zeros(40, dtype=torch.int64)


class Deaf(nn.Module):
    """A model that must not be asked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("noise needs no network")


def test_noise_has_mean_zero_and_the_deviation_asked_for_and_is_not_clipped() -> None:
    noise = (Gaussian(sigma=0.5)(Deaf(), X, Y, THREAT, gen_for(X)) - X) / 0.5
    assert abs(float(noise.mean())) < 4 / noise.numel() ** 0.5
    assert float(noise.square().mean()) == pytest.approx(1, abs=4 * (2 / noise.numel()) ** 0.5)
    assert float((noise.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=4 * (0.217 / noise.numel()) ** 0.5)
    noisy = X + 0.5 * noise
    assert float(noisy.min()) < -0.5
    assert float(noisy.max()) > 1.5
    assert float(THREAT.size(noisy - X).min()) > THREAT.eps


def test_noise_belongs_to_samples() -> None:
    gen, noisy = gen_for(X), Gaussian(sigma=0.1)
    whole = noisy(Deaf(), X, Y, THREAT, gen)
    rows = torch.tensor([3, 17, 4])
    assert torch.equal(noisy(Deaf(), X[rows], Y[rows], THREAT, gen[rows]), whole[rows])
    assert not torch.equal(noisy(Deaf(), X, Y, THREAT, gen.child("again")), whole)


def test_no_noise_is_the_input_itself_bit_by_bit() -> None:
    same = Gaussian(sigma=0)(Deaf(), X, Y, THREAT, gen_for(X))
    assert torch.equal(same, X)
    same += 1
    assert float(X.max()) == 1, "a copy"


@pytest.mark.parametrize("sigma", [-0.1, float("nan"), float("inf"), "loud", True])
def test_bad_sigma(sigma: object) -> None:
    with pytest.raises(ConfigError, match="gaussian sigma must be a number >= 0, got"):
        Gaussian(sigma=sigma)  # type: ignore[arg-type]


def test_sigma_is_in_pixel_units() -> None:
    assert Gaussian(sigma=1).sigma == 1
    with pytest.raises(ConfigError, match=r"gaussian sigma must be at most 1, got 30; .* write 30/255, 0\.12"):
        Gaussian(sigma=30)


def test_no_evaluation_uses_noise() -> None:
    told = r"'gaussian' leaves the ball.*, which only training may; evaluate with pgd or another attack"
    with pytest.raises(ConfigError, match=told):
        parse_attack("gaussian:sigma=0.1")
    with pytest.raises(ConfigError, match=told):
        attack("gaussian", nn.Linear(500, 3).double(), X, Y, THREAT)
    with pytest.raises(ConfigError, match=told):
        evaluate(nn.Linear(500, 3).double(), X, Y, THREAT, attacks=["gaussian"])
    with pytest.raises(ConfigError, match="leaves the ball"):
        load_recipe("digits_at", {"select.attack": "gaussian"})


def test_it_costs_nothing_and_says_what_it_is() -> None:
    chosen = ATTACKS.make("gaussian", sigma=0.12)
    assert chosen.passes(10) == 0
    assert not chosen.bounded
    assert describe(chosen, THREAT) == {"kind": "Gaussian", "sigma": 0.12}


def loss_terms(recipe: str, sigma: float) -> dict[str, torch.Tensor]:
    """The loss of the first training step of a digits recipe with noise."""
    small = {"train.batch_size": 16, "data.limit": 16, "data.held_out": 20, "seed": 3}
    job = build_job(load_recipe(recipe, {**small, "attack": {"name": "gaussian", "sigma": sigma}}))
    job.model.train()
    return dict(train_step(job, next(iter(job.loader.epoch(0))), step=0, guard=True).losses)


def test_at_with_noise_trains_on_noisy_inputs() -> None:
    small = {"train.batch_size": 16, "data.limit": 16, "data.held_out": 20, "seed": 3}
    plain = build_job(load_recipe("digits_standard", small))
    plain.model.train()
    clean = train_step(plain, next(iter(plain.loader.epoch(0))), step=0, guard=True).losses["ce"]
    assert torch.equal(loss_terms("digits_at", 0)["ce_adv"], clean)
    assert not torch.equal(loss_terms("digits_at", 0.25)["ce_adv"], clean)


def test_trades_with_noise_pulls_noisy_answers_to_clean_ones() -> None:
    still, noisy = loss_terms("digits_trades", 0), loss_terms("digits_trades", 0.25)
    assert torch.equal(still["ce"], noisy["ce"]), "the cross-entropy is of clean inputs"
    assert float(still["kl"]) == 0
    assert float(noisy["kl"]) > 1e-4
