"""The same attack as two independent libraries must find the same robust accuracy on a trained network."""

from __future__ import annotations

import warnings
from typing import Any

import foolbox
import pytest
import torch
import torchattacks
from torch import Tensor, nn

from flatrock.attacks.catalog import attack
from flatrock.core.records import Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf
from flatrock.evaluation.evaluate import evaluate

EPS, STEP, STEPS = 0.1, 0.025, 20


def survivors(model: nn.Module, x_adv: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x_adv).argmax(1) == y


def by_torchattacks(model: nn.Module, x: Tensor, y: Tensor, *, random_start: bool) -> Tensor:
    with kept_global_rng(seed=Seed(0).child("peer")):
        peer = torchattacks.PGD(model, eps=EPS, alpha=STEP, steps=STEPS, random_start=random_start)
        x_adv: Tensor = peer(x, y)
    return x_adv


def by_foolbox(model: nn.Module, x: Tensor, y: Tensor, *, random_start: bool) -> Tensor:
    with kept_global_rng(seed=Seed(0).child("peer")), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = foolbox.attacks.LinfPGD(abs_stepsize=STEP, steps=STEPS, random_start=random_start)
        _, x_adv, _ = peer(foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilons=EPS)
    assert isinstance(x_adv, Tensor)
    return x_adv


PEERS = pytest.mark.parametrize("peer", [by_torchattacks, by_foolbox])


@pytest.fixture(scope="module")
def samples(digits: Any) -> tuple[Tensor, Tensor]:
    """Seen and unseen digits: random starts differ by chance, which a thousand samples keep far below a point."""
    return torch.cat([digits.test_x, digits.train_x[:600]]), torch.cat([digits.test_y, digits.train_y[:600]])


@pytest.fixture(scope="module")
def ours(samples: tuple[Tensor, Tensor], digits_model: nn.Module) -> Result:
    spec = {"name": "pgd", "steps": STEPS, "step_size": STEP}
    return evaluate(digits_model, *samples, Linf(EPS), attacks=[spec])


@PEERS
def test_robust_accuracy_equals_the_peers_within_a_point(
    peer: Any, ours: Result, samples: tuple[Tensor, Tensor], digits_model: nn.Module
) -> None:
    x, y = samples
    theirs = float(survivors(digits_model, peer(digits_model, x, y, random_start=True), y).double().mean())
    assert ours.clean > 0.9
    assert 0.2 < ours.robust < 0.95, "a model that is always right or always wrong compares nothing"
    assert abs(ours.robust - theirs) <= 0.01, (ours.robust, theirs)


@PEERS
def test_without_random_start_each_sample_ends_alike(peer: Any, digits: Any, digits_model: nn.Module) -> None:
    """Same start, same steps: the adversarial inputs themselves agree, up to signs of vanishing gradients."""
    x, y = digits.test_x[:200], digits.test_y[:200]
    ours = attack("pgd", digits_model, x, y, Linf(EPS), steps=STEPS, step_size=STEP, start="zero")
    theirs = peer(digits_model, x, y, random_start=False)
    assert float(((ours - theirs).abs() < 1e-5).float().mean()) > 0.99
    same = survivors(digits_model, ours, y) == survivors(digits_model, theirs, y)
    assert bool(same.all())


def test_l2_robust_accuracy_equals_the_peer_within_a_point(
    samples: tuple[Tensor, Tensor], digits_model: nn.Module
) -> None:
    x, y = samples
    eps, step, steps = 0.6, 0.2, 10
    spec = {"name": "pgd", "steps": steps, "step_size": step}
    ours = evaluate(digits_model, x, y, L2(eps), attacks=[spec])
    with kept_global_rng(seed=Seed(0).child("peer")):
        x_adv = torchattacks.PGDL2(digits_model, eps=eps, alpha=step, steps=steps, random_start=True)(x, y)
    theirs = float(survivors(digits_model, x_adv, y).double().mean())
    assert 0.2 < ours.robust < 0.95
    assert abs(ours.robust - theirs) <= 0.01, (ours.robust, theirs)


def test_stronger_attacks_find_at_least_as_much(digits: Any, digits_model: nn.Module) -> None:
    plan = ["fgsm", "pgd-10", "mt-10"]
    found = evaluate(digits_model, digits.test_x[:150], digits.test_y[:150], Linf(EPS), attacks=plan).per_attack
    assert found["fgsm"] > found["pgd-10"] >= found["mt-10"]
