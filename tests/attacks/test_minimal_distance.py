"""The distances FAB finds, the models that make it hard, and options that cannot be."""

from __future__ import annotations

import pytest
import torch
from attack_cases import Make, gen_for, linear_case, minimal, wrong
from torch import Tensor, nn

from flatrock.attacks.boundary import FastAdaptiveBoundary, TargetedBoundary
from flatrock.attacks.catalog import attack, describe, parse_attack
from flatrock.attacks.craft import craft
from flatrock.attacks.fab import Found
from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.threat import Linf, Threat


def test_minimal_says_what_it_found(threat: Threat, conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images(20)
    y = right_labels(model, x)
    y[:4] = (y[:4] + 1) % 4
    points, distance = minimal(model, x, y, threat, by=TargetedBoundary(steps=15))
    assert distance.shape == (20,)
    assert bool((distance[:4] == 0).all())
    assert torch.equal(points[:4], x[:4])
    assert bool(wrong(model, points, y).all())
    torch.testing.assert_close(threat.size(points - x), distance)
    assert float(distance.max()) > threat.eps > float(distance[4:].min()), "the radius is no limit"
    other = type(threat)(threat.eps / 7)
    again = minimal(model, x, y, other, by=TargetedBoundary(steps=15))
    torch.testing.assert_close(again, (points, distance), rtol=0, atol=0)


def test_minimal_of_nothing(conv_net: Make, counting: Make) -> None:
    model = counting(conv_net())
    points, distance = minimal(model, torch.zeros(0, 2, 6, 6, dtype=torch.float64), torch.zeros(0).long(), Linf(0.1))
    assert (points.shape, distance.shape, model.passes) == ((0, 2, 6, 6), (0,), 0)


class Flat(nn.Module):
    """The same answer everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_tensor([1.0, 0.0, -1.0]) + 0 * x.sum(1, keepdim=True)


def test_what_cannot_be_broken_is_infinitely_far(threat: Threat) -> None:
    x, y = torch.full((3, 4), 0.3), torch.tensor([0, 0, 1])
    points, distance = minimal(Flat(), x, y, threat, by=TargetedBoundary(steps=5))
    assert distance.tolist() == [torch.inf, torch.inf, 0]
    assert torch.equal(points, x)
    assert torch.equal(attack("fab", Flat(), x, y, threat, steps=5), x)


# Odd models and options


@pytest.mark.parametrize("name", ["fab", "fab-t"])
def test_two_classes_need_one_target(name: str, threat: Threat) -> None:
    model, x, y = linear_case(6, 2)
    both = [
        minimal(model, x, y, threat, by=by)
        for by in (FastAdaptiveBoundary(steps=9), TargetedBoundary(steps=9, targets=5))
    ]
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=0)
    assert bool(torch.isfinite(both[0][1]).all())
    assert int(wrong(model, attack(name, model, x, y, threat, steps=9), y).sum()) > 0


def test_one_input_and_one_pixel(threat: Threat) -> None:
    class Step(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.zeros_like(x), x - 0.5], 1)

    x = torch.tensor([[0.48]], dtype=torch.float64)
    points, distance = minimal(Step(), x, torch.tensor([0]), threat)
    assert 0.02 < float(distance) < 0.0202
    assert torch.equal(attack("fab-t", Step(), x, torch.tensor([0]), threat), points)


def test_a_rival_that_always_ties_is_no_obstacle(threat: Threat) -> None:
    model, x, y = linear_case(8, 3)
    with torch.no_grad():
        model.weight[1], model.bias[1] = model.weight[0], model.bias[0]
    x, y = x[y != 2], torch.zeros(int((y != 2).sum()), dtype=torch.int64)
    right = ~wrong(model, x, y)
    assert int(right.sum()) > 5
    _, distance = minimal(model, x, y, threat, by=TargetedBoundary(steps=20))
    assert bool(torch.isfinite(distance[right]).all())


class Steep(nn.Module):
    """The gradient of class 1 overflows; that of class 2 does not."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.full_like(x[:, 0], 0.6), x[:, 0] * 1e200 * 1e200, x[:, 1]], 1)


class Rooted(nn.Module):
    """All gradients are infinite or NaN where the first pixel is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([0.6 - x[:, 0].sqrt(), x[:, 1]], 1)


@pytest.mark.parametrize("name", ["fab", "fab-t"])
def test_gradients_that_are_not_finite_do_no_harm(name: str, threat: Threat) -> None:
    """They name no plane: another rival may, and other samples do not notice."""
    x, y = torch.tensor([[0.0, 0.58], [0.0, 0.585]], dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    x_adv = attack(name, Steep(), x, y, threat, steps=20)
    assert bool(wrong(Steep(), x_adv, y).all())
    assert bool((x_adv[:, 0] == 0).all())
    x = torch.tensor([[0.0, 0.5], [0.01, 0.48]], dtype=torch.float64)
    x_adv = attack(name, Rooted(), x, y, threat, steps=20)
    assert torch.equal(x_adv[0], x[0])
    assert wrong(Rooted(), x_adv, y).tolist() == [False, True]


def test_a_model_without_gradient_is_refused(images: Make) -> None:
    class Blind(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach().flatten(1)[:, :3]

    x = images(4)
    with pytest.raises(ModelError, match=r"no gradient w\.r\.t\. its input"):
        attack("fab", Blind(), x, Blind()(x).argmax(1), Linf(0.1))


def test_mixed_labels_are_refused(conv_net: Make, images: Make) -> None:
    x = images(2)
    for chosen in (FastAdaptiveBoundary(), TargetedBoundary()):
        assert not chosen.mixed_labels
        with pytest.raises(ConfigError, match="not defined on mixed labels; use 'pgd' or 'kl-pgd'"):
            craft(chosen, conv_net(), x, torch.full((2, 4), 0.25).double(), Linf(0.1), gen_for(x))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("fab", FastAdaptiveBoundary(steps=100, restarts=1)),
        ("fab-20:restarts=5", FastAdaptiveBoundary(steps=20, restarts=5)),
        ("fab-t", TargetedBoundary(steps=100, restarts=1, targets=9, rows=4096)),
        ("fab-t-50:targets=3:rows=512", TargetedBoundary(steps=50, targets=3, rows=512)),
    ],
)
def test_by_text(spec: str, expected: object) -> None:
    assert parse_attack(spec) == (spec, expected)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fab:steps=0", "fab steps must be a whole number >= 1, got 0"),
        ("fab:restarts=0", "fab restarts must be a whole number >= 1, got 0"),
        ("fab:targets=3", "option of attack 'fab': 'targets'"),
        ("fab-t:targets=0", "fab-t targets must be a whole number >= 1, got 0"),
        ("fab-t:rows=0.5", "fab-t rows must be a whole number >= 1, got 0.5"),
        ("fab-t:steps=true", "fab steps must be a whole number >= 1, got True"),
    ],
)
def test_options_that_cannot_be(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_attack(spec)


def test_results_say_how_it_was_configured() -> None:
    described = describe(TargetedBoundary(), Linf(0.1))
    assert described == {"kind": "TargetedBoundary", "steps": 100, "restarts": 1, "targets": 9, "rows": 4096}


def test_passes_of_few_classes() -> None:
    assert FastAdaptiveBoundary().passes(10) == 201
    assert TargetedBoundary().passes(10) == TargetedBoundary().passes(1000) == 1 + 9 * 200
    assert TargetedBoundary().passes(2) == 201


def test_what_ended_the_search_comes_before_what_is_closer() -> None:
    def found(distance: float, *, final: bool) -> Found:
        return Found(torch.full((1, 2), distance), torch.tensor([distance]), torch.tensor([final]))

    near, far, over = found(0.1, final=False), found(0.2, final=False), found(0.3, final=True)
    for one, two, best in [(near, far, near), (far, over, over), (near, over, over), (over, over, over)]:
        for merged in (one.improved(two), two.improved(one)):
            assert float(merged.distance) == float(best.distance) == pytest.approx(float(merged.points[0, 0]))
            assert bool(merged.final) == bool(best.final)
