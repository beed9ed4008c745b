"""S2O: golden rows, loops over numbers, and strength zero."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.hooks import Look, Moment, Penalty
from flatrock.core.rng import Seed
from flatrock.core.types import Objective, View, Views
from flatrock.flatness.s2o import S2O
from flatrock.objectives.at import AT
from flatrock.objectives.mart import MART
from flatrock.objectives.trades import TRADES

W = torch.tensor([[1, -0.5], [0.25, 0.75], [-1, 0.5]], dtype=torch.float64)
FEATURES = torch.tensor([[1, 2], [0.5, -1]], dtype=torch.float64)
LABELS = torch.tensor([0, 2])


def look(clean: Tensor, adv: Tensor, y: Tensor, objective: Objective | None = None) -> Look:
    views = Views(View(clean, clean), View(adv, adv))
    x, moment = torch.zeros(0), Moment(epoch=1, step=0, share=0.0, seed=Seed(0))
    return Look(nn.Identity(), x, x, y, views, (objective or TRADES()).loss(views, y), moment)


def penalty_of(s2o: S2O, seen: Look) -> Penalty:
    penalty = s2o.in_loss(seen)
    assert penalty is not None
    return penalty


def batch(n: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    clean, adv = torch.randn(2, n, classes, generator=Seed(0).child("s2o").generator(), dtype=torch.float64)
    return clean, adv, torch.arange(n) % classes


def loop_half(z: list[list[float]], y: list[int], cc: float) -> float:
    """Mean KL(B[y] || softmax(z)) in plain numbers."""
    classes, total = len(z[0]), 0.0
    for k, row in zip(y, z, strict=True):
        a = [abs(sum(r[k] * r[j] for r in z)) for j in range(classes)]
        mass = [0.0 if j == k else max(a) - a[j] for j in range(classes)]
        target = [1 - cc if j == k else cc * m / sum(mass) for j, m in enumerate(mass)]
        norm = math.log(sum(math.exp(v) for v in row))
        total += sum(p * (math.log(p) - v + norm) for p, v in zip(target, row, strict=True) if p > 0)
    return total / len(y)


def test_golden_rows() -> None:
    """Labels 0 and 2 of the golden logits have the targets (.2, .8, 0) and (0, .8, .2)."""
    z = FEATURES @ W.T
    targets = torch.tensor([[0.2, 0.8, 0], [0, 0.8, 0.2]], dtype=torch.float64)
    expected = F.kl_div(z.log_softmax(1), targets, reduction="batchmean")
    assert float(penalty_of(S2O(cc=0.8), look(z, z, LABELS)).terms["s2o"]) == pytest.approx(float(expected), rel=1e-13)


@pytest.mark.parametrize(("classes", "cc"), [(3, 0.8), (5, 0.3), (10, None)])
def test_term_equals_loops(classes: int, cc: float | None) -> None:
    clean, adv, y = batch(11, classes)
    off = 0.8 if cc is None else cc
    expected = sum(loop_half(z.tolist(), y.tolist(), off) for z in (clean, adv)) / 2
    assert float(penalty_of(S2O(cc=cc), look(clean, adv, y)).terms["s2o"]) == pytest.approx(expected, rel=1e-12)


def test_gradient_takes_the_targets_as_constants() -> None:
    clean, adv, y = batch(7, 4)
    logits = [clean.requires_grad_(), adv.requires_grad_()]
    got = torch.autograd.grad(penalty_of(S2O(cc=0.8), look(*logits, y)).terms["s2o"], logits)
    for z, gradient in zip(logits, got, strict=True):
        a = (z.T @ z).detach().abs()
        b = a.amax(1, keepdim=True) - a
        b.fill_diagonal_(0)
        b = (0.8 * b / b.sum(1, keepdim=True)).fill_diagonal_(0.2)
        assert torch.allclose(gradient, (z.softmax(1).detach() - b[y]) / 14, rtol=0, atol=1e-14)


@pytest.mark.parametrize("objective", [AT(), TRADES(), MART()])
@pytest.mark.parametrize("weight", [0.1, 0.3, 1.0])
def test_weights(objective: Objective, weight: float) -> None:
    clean, adv, y = batch(6, 3)
    penalty = penalty_of(S2O(weight=weight), look(clean, adv, y, objective))
    assert penalty.weights == {"s2o": weight}
    assert penalty.label_factor == pytest.approx(1 - weight)
    assert list(penalty.terms) == ["s2o"]


def test_unlabeled_and_mixed_labels() -> None:
    clean, adv, y = batch(6, 3)
    hard = float(penalty_of(S2O(), look(clean, adv, y)).terms["s2o"])
    rows = float(penalty_of(S2O(), look(clean, adv, F.one_hot(y, 3).double())).terms["s2o"])
    assert rows == pytest.approx(hard, rel=1e-14)
    # Unlabeled samples still shape A, which knows no labels; equal logits twice only double it.
    twice = look(clean.repeat(2, 1), adv.repeat(2, 1), torch.cat([y, torch.full((6,), -1)]))
    assert float(penalty_of(S2O(), twice).terms["s2o"]) == pytest.approx(hard, rel=1e-12)
    nothing = look(clean, adv, torch.full((6,), -1))
    assert float(penalty_of(S2O(), nothing).terms["s2o"]) == 0


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_degenerate_logits_are_finite(classes: int) -> None:
    for z in (torch.zeros(4, classes), torch.ones(4, classes), torch.eye(classes)[:1].repeat(4, 1)):
        logits = z.clone().requires_grad_()
        term = penalty_of(S2O(cc=0.8), look(logits, logits, torch.arange(4) % classes)).terms["s2o"]
        assert bool(term.isfinite())
        assert bool(torch.autograd.grad(term, logits)[0].isfinite().all())


def test_no_strength_adds_nothing() -> None:
    clean, adv, y = batch(6, 3)
    assert S2O(weight=0.0).in_loss(look(clean, adv, y)) is None
    assert S2O(weight=0.0).needs == ()
    assert S2O().needs == ("clean", "adv")
    assert S2O().passes(2, 10) == 0


def test_a_missing_pass_is_an_error() -> None:
    clean, adv, y = batch(6, 3)
    seen = look(clean, adv, y, AT())
    views = Views(None, seen.views.adv)
    with pytest.raises(RuntimeError, match="not given both"):
        S2O().in_loss(Look(seen.model, seen.x, seen.x_adv, y, views, seen.parts, seen.moment))


@pytest.mark.parametrize("options", [{"weight": -0.1}, {"weight": 1.1}, {"weight": "big"}, {"cc": 1.5}, {"cc": -1.0}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"s2o {next(iter(options))} must"):
        S2O(**options)
