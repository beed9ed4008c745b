"""GAT: its gradient in closed form, the weight that rises, and what weight 0 leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attack_cases import Waits
from objective_cases import batch, views
from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.core.hooks import Moment, TimedObjective
from flatrock.core.rng import Seed
from flatrock.core.types import View, Views
from flatrock.objectives.gat import GAT
from flatrock.objectives.standard import Standard
from flatrock.objectives.trades import TRADES


def moment(share: float, step: int = 0) -> Moment:
    return Moment(epoch=1, step=step, share=share, seed=Seed(0))


def test_defaults_are_the_papers() -> None:
    assert GAT() == GAT(weight=10.0, rise=4.0, rise_after=0.85)
    assert GAT.passes == ("clean", "adv")


@pytest.mark.parametrize(("share", "weight"), [(0.0, 10.0), (0.8499, 10.0), (0.85, 40.0), (1.0, 40.0)])
def test_the_gradient_of_a_linear_network_in_closed_form(share: float, weight: float) -> None:
    """dCE/dz = s - e_y; d||s - t||^2/dz = 2 Phi r, and -2 Phi' r for z'; r = s - t, Phi = diag s - s s^T."""
    gen = Seed(3).child("gat").generator()
    x, x_adv = (torch.randn(9, 4, generator=gen, dtype=torch.float64) for _ in range(2))
    w = torch.randn(5, 4, generator=gen, dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, (9,), generator=gen)
    parts = GAT().at(moment(share)).loss(Views(*(View(v, v @ w.T) for v in (x, x_adv))), y)
    (got,) = torch.autograd.grad(parts.total, w)
    by_hand, value = torch.zeros_like(w), 0.0
    with torch.no_grad():
        for i in range(9):
            s, t = ((w @ v[i]).softmax(0) for v in (x, x_adv))
            r = s - t
            phi, phi_adv = (torch.diag(p) - torch.outer(p, p) for p in (s, t))
            by_hand += torch.outer(s - torch.eye(5, dtype=torch.float64)[y[i]] + 2 * weight * phi @ r, x[i]) / 9
            by_hand -= torch.outer(2 * weight * phi_adv @ r, x_adv[i]) / 9
            value += float(-s[y[i]].log() + weight * (r * r).sum()) / 9
    torch.testing.assert_close(got, by_hand, rtol=1e-12, atol=1e-14)
    assert parts.total.item() == pytest.approx(value, rel=1e-13)


@pytest.mark.parametrize("per_epoch", [1, 7, 391])
def test_the_weight_rises_after_epoch_85_of_100(per_epoch: int) -> None:
    last = 100 * per_epoch - 1
    shares = [step / last for step in (0, 85 * per_epoch - 1, 85 * per_epoch, last)]
    assert [GAT().at(moment(s)).weight for s in shares] == [10, 10, 40, 40]
    assert GAT(rise=1.0).at(moment(1.0)).weight == 10
    once = GAT().at(moment(1.0))
    assert once.at(moment(1.0)) == once, "it rises once"


def test_time_is_told_to_it_alone() -> None:
    assert isinstance(GAT(), TimedObjective)
    assert not isinstance(TRADES(), TimedObjective)
    assert {GAT().at(moment(0.5, step)) for step in range(5)} == {GAT(rise=1.0)}


def test_weight_0_is_standard_training_to_the_bit() -> None:
    clean, adv, y = batch()
    bare = Views(*(View(z, z) for z in (clean, adv)))
    got, expected = GAT(weight=0.0).at(moment(1.0)).loss(bare, y), Standard().loss(bare, y)
    assert got.total.item() == expected.total.item()
    clean.requires_grad_(True)
    found = [torch.autograd.grad(o.loss(views(clean, adv), y).total, clean)[0] for o in (GAT(weight=0.0), Standard())]
    assert torch.equal(*found)


def test_mixed_labels_concern_the_cross_entropy_only() -> None:
    clean, adv, y = batch(12)
    one_hot = nn.functional.one_hot(y, 5).double()
    hard, soft, mixed = (GAT().loss(views(clean, adv), t) for t in (y, one_hot, (one_hot + one_hot.flip(0)) / 2))
    torch.testing.assert_close(soft.total, hard.total)
    assert float(mixed.terms["ce"]) != pytest.approx(float(hard.terms["ce"]), rel=1e-3)
    assert mixed.terms["pair_probabilities"].item() == hard.terms["pair_probabilities"].item()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": -1}, "gat weight must be a number >= 0, got -1"),
        ({"rise": float("inf")}, "gat rise must be a number >= 0, got inf"),
        ({"rise_after": 85}, r"gat rise_after must lie in \[0, 1\], got 85"),
        ({"rise_after": True}, "gat rise_after must be a number"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GAT(**options)


def test_nothing_waits_for_a_gpu() -> None:
    clean, adv, y = batch(8)
    with Waits() as waits:
        total = GAT().at(moment(0.9)).loss(views(clean.requires_grad_(True), adv), y).total
        torch.autograd.grad(total, clean)
    assert waits.found == []
