"""FAB and FAB-T beside the official attack, step by step, and the closed form of a linear model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attack_cases import Make, exact_radius, gen_for, linear_case, minimal, rivals_of, wrong
from pyautoattack.fab_pt import FABAttack_PT
from torch import Tensor, nn

from flatrock.attacks.boundary import FastAdaptiveBoundary, TargetedBoundary, random_start
from flatrock.attacks.craft import craft
from flatrock.attacks.fab import fab
from flatrock.core.threat import L2, Linf, Threat
from flatrock.evaluation.evaluate import evaluate

PEER_NORM = {"linf": "Linf", "l2": "L2"}


@contextmanager
def official(model: nn.Module, threat: Threat, **options: Any) -> Iterator[FABAttack_PT]:
    """The official attack; it casts to float32 and builds tensors of the default type: both mean float64 inside."""
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield FABAttack_PT(model, norm=PEER_NORM[threat.norm], eps=threat.eps, device="cpu", **options)
        finally:
            torch.set_default_dtype(before)


# The official attack


def test_all_points_of_fab_are_the_official_ones(
    threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images(16)
    y = right_labels(model, x)
    y[:3] = (y[:3] + 1) % 4
    with official(model, threat, n_iter=25) as peer:
        expected = peer.attack_single_run(x, y)
    points, distance = minimal(model, x, y, threat, by=FastAdaptiveBoundary(steps=25))
    torch.testing.assert_close(points, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(distance, threat.size(expected - x), rtol=0, atol=1e-10)
    assert distance[:3].tolist() == [0, 0, 0]
    assert float(distance[3:].min()) > 0


def test_all_distances_of_fab_t_are_the_official_ones(
    threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    """Every target on its own, and the closest of them."""
    model, x = conv_net(), images(12)
    y = right_labels(model, x)
    distances = []
    for rank in (1, 2, 3):
        with official(model, threat, n_iter=15) as peer:
            peer.target_class = rank + 1
            expected = peer.attack_single_run(x, y, is_targeted=True)
        found = fab(model, x, y, rivals_of(model, x, y)[:, rank - 1 : rank], threat, steps=15)
        torch.testing.assert_close(found.points, expected, rtol=0, atol=1e-10)
        distances.append(threat.size(expected - x))
        _, closest = minimal(model, x, y, threat, by=TargetedBoundary(steps=15, targets=rank))
        torch.testing.assert_close(closest, torch.stack(distances).amin(0), rtol=0, atol=1e-10)
    assert len({d.sum().item() for d in distances}) == 3


def test_random_starts_are_the_official_ones(
    threat: Threat,
    conv_net: Make,
    images: Make,
    right_labels: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = conv_net(), images(12)
    y, gen = right_labels(model, x), gen_for(x).child("start")
    monkeypatch.setattr(torch, "rand", lambda _: gen.uniform(x))
    monkeypatch.setattr(torch, "randn", lambda _: gen.normal(x))
    with official(model, threat, n_iter=10) as peer:
        expected = peer.attack_single_run(x, y, use_rand_start=True)
    start = random_start(x, threat, torch.full((12,), threat.eps / 2, dtype=torch.float64), gen)
    found = fab(model, x, y, rivals_of(model, x, y), threat, steps=10, start=start)
    torch.testing.assert_close(found.points, expected, rtol=0, atol=1e-10)
    plain = fab(model, x, y, rivals_of(model, x, y), threat, steps=10)
    assert float((plain.points - expected).abs().max()) > 1e-6


@pytest.mark.parametrize("targeted", [False, True])
def test_verdicts_are_the_official_ones(
    threat: Threat, targeted: bool, conv_net: Make, images: Make, right_labels: Make
) -> None:
    model, x = conv_net(), images(40)
    y = right_labels(model, x)
    with official(model, threat, n_iter=12, targeted=targeted, n_target_classes=3) as peer:
        expected = wrong(model, peer.perturb(x, y), y)
    chosen = TargetedBoundary(steps=12) if targeted else FastAdaptiveBoundary(steps=12)
    assert 0 < int(expected.sum()) < 40
    for early_stop in (False, True):
        x_adv = craft(chosen, model, x, y, threat, gen_for(x), early_stop=early_stop)
        assert torch.equal(wrong(model, x_adv, y), expected)


# The closed form of a linear model


@pytest.mark.parametrize("classes", [2, 5, 12])
@pytest.mark.parametrize("by", [FastAdaptiveBoundary(steps=30), TargetedBoundary(steps=30)], ids=["fab", "fab-t"])
def test_distances_on_a_linear_model(threat: Threat, by: FastAdaptiveBoundary, classes: int) -> None:
    """The last pull back leaves a tenth of the way, of which the next step goes 1.05 times: about 1.0052 in all."""
    model, x, y = linear_case(20, classes)
    exact = exact_radius(model, x, y, threat.norm)
    points, distance = minimal(model, x, y, threat, by=by)
    ratio = distance / exact
    assert float(ratio.min()) >= 1
    assert float(ratio.max()) <= 1.0053
    assert float(ratio.median()) == pytest.approx(1.0052, abs=1e-4)
    assert bool(wrong(model, points, y).all())
    torch.testing.assert_close(threat.size(points - x), distance, rtol=0, atol=0)


def test_distances_of_long_vectors_in_float32(threat: Threat) -> None:
    model, x, y = linear_case(3072, 5, n=12, dtype=torch.float32)
    _, distance = minimal(model, x, y, threat, by=FastAdaptiveBoundary(steps=20))
    ratio = distance / exact_radius(model, x, y, threat.norm)
    assert float(ratio.min()) > 1 - 1e-4
    assert float(ratio.max()) < 1.01


def test_a_boundary_behind_the_faces_of_the_box(threat: Threat) -> None:
    """Class 1 wins where x_0 + x_1 > 1.2; x_0 can rise by 0.1 only, so x_1 goes the rest."""

    class Corner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = x.sum(1) - 1.2
            return torch.stack([-z, z], 1)

    x = torch.tensor([[0.9, 0.1]], dtype=torch.float64)
    points, distance = minimal(Corner(), x, torch.tensor([0]), threat, by=FastAdaptiveBoundary(steps=30))
    exact = 0.1 if threat.norm == "linf" else 0.02**0.5
    assert exact < float(distance) < 1.02 * exact
    assert float(points.max()) <= 1
    x = torch.tensor([[0.95, 0.0]], dtype=torch.float64)
    far, distance = minimal(Corner(), x, torch.tensor([0]), threat, by=FastAdaptiveBoundary(steps=30))
    exact = 0.2 if threat.norm == "linf" else (0.05**2 + 0.2**2) ** 0.5
    assert exact < float(distance) < 1.02 * exact
    assert float(far[0, 0]) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("norm", [Linf, L2])
def test_evaluation_reports_the_closed_form(norm: type[Linf] | type[L2]) -> None:
    model, x, y = linear_case(20, 5)
    exact = exact_radius(model, x, y, norm.norm)
    threat = norm(float(exact.median()) * 1.02)
    clear = (exact / threat.eps - 1).abs() > 0.006  # FAB goes 0.52 % too far
    result = evaluate(model, x, y, threat, attacks=["fab-20", "fab-t-20"], batch_size=25)
    for label in ("fab-20", "fab-t-20"):
        assert torch.equal(result.flags[label][clear], (exact > threat.eps)[clear])
    assert int(clear.sum()) > 50
