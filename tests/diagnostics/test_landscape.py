"""Directions in weight space: filter norms, the plain loss at the middle, blind to rescaling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.attacks.craft import craft
from flatrock.attacks.gradient import GradientAttack
from flatrock.core.borrow import nudged
from flatrock.core.hooks import Shift
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import Linf
from flatrock.diagnostics.landscape import combined, filter_direction
from flatrock.models.catalog import create_model

ALPHAS = [-0.5, 0.0, 0.25, 1.0]


def test_every_filter_has_the_norm_of_the_weights_and_the_rest_stays() -> None:
    model = create_model("digits_cnn", seed=3)
    direction = filter_direction(model, Seed(1))
    weights = {n: p.detach() for n, p in model.named_parameters()}
    assert set(direction) == {n for n, p in weights.items() if p.dim() > 1}
    for name, d in direction.items():
        for got, expected in zip(d, weights[name], strict=True):
            assert float(got.norm()) == pytest.approx(float(expected.norm()), rel=1e-5)
    assert not torch.equal(direction["head.weight"], weights["head.weight"])


def relu_net(scale: float) -> nn.Module:
    """Two layers; the second undoes what `scale` does to the first."""
    with kept_global_rng(seed=Seed(0)):
        net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)).double()
    with torch.no_grad():
        net[1].weight.mul_(scale)  # type: ignore[operator]
        net[1].bias.mul_(scale)  # type: ignore[operator]
        net[3].weight.div_(scale)  # type: ignore[operator]
    return net.eval()


def inputs() -> tuple[Tensor, Tensor]:
    gen = Seed(5).generator()
    return torch.rand(32, 1, 4, 4, generator=gen, dtype=torch.float64), torch.randint(3, (32,), generator=gen)


def along(model: nn.Module, direction: Shift, measure: Callable[[nn.Module], float]) -> list[float]:
    """What `measure` says of the network with weights w + alpha d."""
    found = []
    for alpha in ALPHAS:
        with nudged(model, combined([direction], [alpha])):
            found.append(measure(model))
    return found


def adversarial_loss(model: nn.Module) -> float:
    """Attacked anew at every point, with the same random numbers."""
    x, y = inputs()
    attack = GradientAttack(steps=5, step_size=0.02)
    x_adv = craft(attack, model, x, y, Linf(0.05), Seed(9).samples(torch.arange(len(x))))
    with torch.no_grad():
        return float(F.cross_entropy(model(x_adv), y))


def test_the_middle_is_the_plain_adversarial_loss() -> None:
    model = relu_net(1.0)
    curve = along(model, filter_direction(model, Seed(2)), adversarial_loss)
    assert curve[1] == adversarial_loss(model)
    assert len(set(curve)) == len(ALPHAS)


def test_rescaling_a_relu_network_leaves_the_curve_as_it_is() -> None:
    curves = []
    for scale in (1.0, 10.0):
        model = relu_net(scale)
        curves.append(along(model, filter_direction(model, Seed(2)), adversarial_loss))
    assert curves[1] == pytest.approx(curves[0], rel=1e-9)
    plain = relu_net(10.0)
    raw = {n: torch.ones_like(p) * 0.1 for n, p in plain.named_parameters() if p.dim() > 1}
    other = along(plain, raw, adversarial_loss)
    same = along(relu_net(1.0), raw, adversarial_loss)
    assert other[3] != pytest.approx(same[3], rel=1e-3), "without filter normalisation the curve does change"


def test_directions_depend_on_the_seed_alone() -> None:
    model = create_model("digits_cnn", seed=3)
    a, b, c = (filter_direction(model, Seed(s)) for s in (1, 1, 2))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["head.weight"], c["head.weight"])
