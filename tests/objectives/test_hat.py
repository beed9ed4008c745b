"""HAT: its gradient in closed form, what it shares with TRADES, whose labels count where, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from objective_cases import batch, views
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.core.types import LABEL_TERMS, View, Views
from flatrock.objectives.hat import HAT
from flatrock.objectives.trades import TRADES

DEFAULT = HAT(helper="runs/some")


def test_defaults_are_the_papers() -> None:
    assert (DEFAULT.beta, DEFAULT.gamma, DEFAULT.reach) == (2.5, 0.5, 2.0)
    assert not DEFAULT.hard_labels


@pytest.mark.parametrize(("beta", "gamma"), [(2.5, 0.5), (0.0, 2.0), (6.0, 0.1)])
def test_the_gradient_of_a_linear_network_in_closed_form(beta: float, gamma: float) -> None:
    """dCE/dz = s - e_y; dKL/dz = s (a - K), a = log s - log t, dKL/dz' = t - s; no gradient through y_h."""
    gen = Seed(3).child("hat").generator()
    x, x_adv = (torch.randn(9, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    x_h = x + 2 * (x_adv - x)
    w = torch.randn(5, 4, generator=gen, dtype=torch.float64, requires_grad=True)
    y, y_h = (torch.randint(5, (9,), generator=gen) for _ in range(2))
    seen = (View(v, v @ w.T) for v in (x, x_adv, x_h))
    parts = HAT(beta=beta, gamma=gamma, helper="runs/some").loss(Views(*seen, y_h), y)
    (got,) = torch.autograd.grad(parts.total, w)
    with torch.no_grad():
        s, t, u = ((v @ w.T).softmax(1) for v in (x, x_adv, x_h))
        one_hot, said = (nn.functional.one_hot(labels, 5) for labels in (y, y_h))
        a = s.log() - t.log()
        kl = (s * a).sum(1, keepdim=True)
        by_hand = (s - one_hot).T @ x + beta * ((s * (a - kl)).T @ x + (t - s).T @ x_adv) + gamma * (u - said).T @ x_h
        ce, helped = ((p.log() * labels).sum(1) for p, labels in ((s, one_hot), (u, said)))
        value = (-ce + beta * kl.squeeze(1) - gamma * helped).mean()
    torch.testing.assert_close(got, by_hand / 9, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(parts.total.detach(), value, rtol=1e-13, atol=1e-14)


def test_without_gamma_it_is_trades_to_the_bit() -> None:
    clean, adv, y = batch()
    bare = Views(*(View(z, z) for z in (clean, adv)))
    got, expected = HAT(beta=6.0, gamma=0.0).loss(bare, y), TRADES(beta=6.0).loss(bare, y)
    assert got.weights == expected.weights
    assert {k: v.item() for k, v in got.terms.items()} == {k: v.item() for k, v in expected.terms.items()}
    assert got.total.item() == expected.total.item()


def test_on_at_it_is_cross_entropy_three_times() -> None:
    """Closed form of a linear network: (s - e_y) x + beta (t - e_y) x' + gamma (u - e_{y_h}) x_h, batch means."""
    gen = Seed(4).child("hat").generator()
    x, x_adv = (torch.randn(7, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    inputs = (x, x_adv, 2 * x_adv - x)
    w = torch.randn(5, 4, generator=gen, dtype=torch.float64, requires_grad=True)
    y, y_h = (torch.randint(5, (7,), generator=gen) for _ in range(2))
    parts = HAT(form="at", beta=1.5, gamma=0.25, helper="runs/some").loss(
        Views(*(View(v, v @ w.T) for v in inputs), y_h), y
    )
    assert (list(parts.terms), parts.weights) == (
        ["ce", "ce_adv", "ce_helper"],
        {"ce": 1, "ce_adv": 1.5, "ce_helper": 0.25},
    )
    (got,) = torch.autograd.grad(parts.total, w)
    labels = [nn.functional.one_hot(k, 5) for k in (y, y, y_h)]
    slopes = [((v @ w.detach().T).softmax(1) - e).T @ v / 7 for v, e in zip(inputs, labels, strict=True)]
    torch.testing.assert_close(got, slopes[0] + 1.5 * slopes[1] + 0.25 * slopes[2], rtol=1e-12, atol=1e-14)


def test_the_helper_labels_samples_that_have_none() -> None:
    clean, adv, y = batch(20)
    labelled = torch.arange(20) % 3 == 0
    got = DEFAULT.loss(views(clean, adv), y.where(labelled, torch.tensor(-1))).terms
    all_of_them, some = (DEFAULT.loss(views(clean[r], adv[r]), y[r]).terms for r in (torch.ones(20).bool(), labelled))
    torch.testing.assert_close(got["kl"], all_of_them["kl"])
    torch.testing.assert_close(got["ce_helper"], all_of_them["ce_helper"])
    torch.testing.assert_close(got["ce"], some["ce"])
    assert not torch.allclose(got["ce"], all_of_them["ce"])


def test_mixed_labels_concern_the_clean_pass_only() -> None:
    clean, adv, y = batch(12)
    one_hot = nn.functional.one_hot(y, 5).double()
    hard, soft, mixed = (DEFAULT.loss(views(clean, adv), t) for t in (y, one_hot, (one_hot + one_hot.flip(0)) / 2))
    torch.testing.assert_close(soft.total, hard.total)
    assert float(mixed.terms["ce"]) != pytest.approx(float(hard.terms["ce"]), rel=1e-3)
    assert mixed.terms["ce_helper"].item() == hard.terms["ce_helper"].item()


def test_soft_labels_take_no_weight_from_the_helpers() -> None:
    assert "ce_helper" in DEFAULT.loss(views(*batch()[:2]), batch()[2]).terms
    assert "ce_helper" not in LABEL_TERMS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "hat helper is missing: name the run folder.*gamma to 0"),
        ({"helper": ""}, "hat helper is missing"),
        ({"helper": 3}, "helper must be the path of a run folder or checkpoint, got 3"),
        ({"helper": None, "gamma": 0}, "helper must be the path"),
        ({"helper": "x", "reach": -1}, "reach must be a number >= 0, got -1"),
        ({"helper": "x", "form": "mart"}, "unknown hat form 'mart'; known: at, trades"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HAT(**options)


@pytest.mark.parametrize("missing", ["labels", "pass"])
def test_what_the_engine_owes(missing: str) -> None:
    clean, adv, y = batch()
    seen: list[View] = [View(z, z) for z in (clean, adv)]
    labels: Tensor | None = y if missing == "pass" else None
    with pytest.raises(RuntimeError, match="the labels of its helper" if missing == "labels" else "a network pass"):
        DEFAULT.loss(Views(seen[0], seen[1], None if missing == "pass" else seen[1], labels), y)
