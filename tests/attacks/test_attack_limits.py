"""What no attack may do: leave the ball or the box, take more passes than asked, or change its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attack_cases import BOUNDED, LINF_ONLY, QUICK, Make, Row, gen_for, wrong
from torch import Tensor, nn

from flatrock.attacks.catalog import ATTACKS, attack
from flatrock.attacks.craft import craft
from flatrock.core.errors import ConfigError, ThreatError
from flatrock.core.rng import SampleGen, Seed
from flatrock.core.threat import L2, Linf, Threat
from flatrock.core.types import Attack


def test_every_attack_in_the_catalog_is_tested_here(attack_names: set[str]) -> None:
    assert attack_names == set(BOUNDED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("early_stop", [False, True])
def test_ball_and_box_hold_at_the_faces_of_the_box(
    attack_row: Row,
    threat: Threat,
    dtype: torch.dtype,
    early_stop: bool,
    conv_net: Make,
    images: Make,
    right_labels: Make,
) -> None:
    name, options = attack_row
    model, x = conv_net(dtype=dtype), images(dtype=dtype)
    y = right_labels(model, x)
    x_adv = craft(ATTACKS.make(name, **options), model, x, y, threat, gen_for(x), early_stop=early_stop)
    assert x_adv.dtype == dtype
    assert not x_adv.requires_grad
    assert float(threat.size(x_adv.double() - x.double()).max()) <= threat.eps + 1e-6
    assert float(x_adv.min()) >= 0
    assert float(x_adv.max()) <= 1
    assert not torch.equal(x_adv, x)
    assert int(wrong(model, x_adv, y).sum()) > 0


@pytest.mark.parametrize(("side", "eps"), [(32, 128 / 255), (32, 3.0), (224, 128 / 255), (224, 3.0)])
def test_long_vectors_in_float32_stay_in_the_l2_ball(side: int, eps: float) -> None:
    """Sums of 150528 squares round; L2(3) on 3x224x224 is the usual ImageNet threat."""
    gen = Seed(0).generator()
    shape = (8, 3, side, side)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 2))
    push = torch.randn(shape[1:], generator=gen).sign() + 0.2 * torch.rand(shape[1:], generator=gen)
    with torch.no_grad():
        model[1].weight.copy_(torch.stack([-push.flatten(), push.flatten()]))
    x = 0.5 + 0.1 * (torch.rand(shape, generator=gen) - 0.5)
    x_adv = attack("pgd", model, x, torch.zeros(8, dtype=torch.int64), L2(eps), steps=20)
    assert float(L2(eps).size(x_adv.double() - x.double()).max()) <= eps + 1e-6


@pytest.mark.parametrize("threat", [Linf(0.0), L2(0.0)], ids=["linf", "l2"])
@pytest.mark.parametrize("early_stop", [False, True])
def test_zero_eps_returns_the_input(
    attack_row: Row,
    threat: Threat,
    early_stop: bool,
    conv_net: Make,
    images: Make,
    right_labels: Make,
) -> None:
    name, options = attack_row
    model, x = conv_net(dtype=torch.float32), images(dtype=torch.float32)
    y = right_labels(model, x)
    y[::3] = (y[::3] + 1) % 4
    x_adv = craft(ATTACKS.make(name, **options), model, x, y, threat, gen_for(x), early_stop=early_stop)
    assert torch.equal(x_adv, x)


@pytest.mark.parametrize("name", ["pgd", "cw", "kl-pgd"])
def test_zero_steps_return_the_start(name: str, conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images()
    y = right_labels(model, x)
    start = "gaussian" if name == "kl-pgd" else "zero"
    x_adv = attack(name, model, x, y, Linf(0.1), steps=0, start=start, noise=1e-3)
    assert torch.equal(x_adv, x) == (start == "zero")
    assert float((x_adv - x).abs().max()) < 0.01


@pytest.mark.parametrize(
    ("name", "options", "passes"),
    [
        ("fgsm", {}, 1),
        ("pgd", {"steps": 0}, 0),
        ("pgd", {"steps": 1}, 1),
        ("pgd", {"steps": 7}, 7),
        ("cw", {"steps": 7}, 7),
        ("pgd", {"steps": 7, "loss": "dlr"}, 7),
        ("kl-pgd", {"steps": 7}, 7 + 1),
        ("pgd", {"steps": 7, "restarts": 3}, 3 * (7 + 1)),
        ("kl-pgd", {"steps": 7, "restarts": 3}, 1 + 3 * (7 + 1)),
        ("mt", {"steps": 7}, 1 + 3 * (7 + 1)),
        ("langevin", {"steps": 1}, 1),
        ("langevin", {"steps": 7}, 7),
        ("langevin", {"steps": 7, "project": "every", "drift": "paper"}, 7),
        ("square", {"queries": 1}, 1 + 1),
        ("square", {"queries": 70}, 1 + 70),
        ("square", {"queries": 7, "restarts": 3}, 1 + 3 * 7),
        ("apgd-ce", {"steps": 1}, 1 + 1),
        ("apgd-ce", {"steps": 7}, 7 + 1),
        ("apgd-dlr", {"steps": 7, "restarts": 3, "eot": 2}, 3 * 2 * (7 + 1)),
        ("apgd-t", {"steps": 7, "rows": 10, "targets": 1}, 1 + (7 + 1)),
    ],
)
def test_steps_equal_forward_passes(
    name: str,
    options: dict[str, Any],
    passes: int,
    threat: Threat,
    counting: Make,
    conv_net: Make,
    images: Make,
    right_labels: Make,
) -> None:
    """Restarts and targets cost one pass each to judge what they found."""
    model, x = counting(conv_net()), images(10)
    y = right_labels(model.model, x)
    attack(name, model, x, y, threat, **options)
    assert model.passes == passes
    assert model.samples == 10 * passes


@pytest.mark.parametrize("early_stop", [False, True])
def test_odd_batches(
    attack_row: Row,
    threat: Threat,
    early_stop: bool,
    conv_net: Make,
    images: Make,
    right_labels: Make,
) -> None:
    """One sample; a batch that is wrong from the start."""
    name, options = attack_row
    model, chosen = conv_net(), ATTACKS.make(name, **options)
    for n, shift in ((1, 0), (5, 1)):
        x = images(n)
        y = (right_labels(model, x) + shift) % 4
        x_adv = craft(chosen, model, x, y, threat, gen_for(x), early_stop=early_stop)
        assert x_adv.shape == x.shape
        if shift and name != "kl-pgd":
            assert bool(wrong(model, x_adv, y).all())


def test_empty_batch_costs_nothing(attack_row: Row, threat: Threat, counting: Make, conv_net: Make) -> None:
    name, options = attack_row
    model = counting(conv_net())
    x_adv = attack(name, model, torch.zeros(0, 2, 6, 6), torch.zeros(0, dtype=torch.int64), threat, **options)
    assert x_adv.shape == (0, 2, 6, 6)
    assert model.passes == 0


# Losses that need more classes; they say what to use instead.
TOO_FEW = {("apgd-dlr", 2): "use 'cw'", ("apgd-t", 2): "use loss 'margin'", ("apgd-t", 3): "use loss 'margin'"}


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.25)], ids=["linf", "l2"])
def test_vectors_and_few_classes(threat: Threat, name: str, classes: int) -> None:
    gen = Seed(3).generator()
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, classes)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=gen))
        model[0].bias.copy_(-0.5 * model[0].weight.sum(1))  # the origin of the network lies in the middle of the box
        model[2].bias.zero_()
    x = torch.rand(40, 5, generator=gen, dtype=torch.float64)
    y = model(x).argmax(1)
    if cure := TOO_FEW.get((name, classes)):
        with pytest.raises(ConfigError, match=f"needs at least . classes, the model has {classes}; {cure}"):
            attack(name, model, x, y, threat)
        return
    if name in LINF_ONLY and threat.norm != Linf.norm:
        with pytest.raises(ConfigError, match=f"'{name}' measures linf distances, got l2; use 'square'"):
            attack(name, model, x, y, threat)
        return
    x_adv = attack(name, model, x, y, threat, **QUICK.get(name, {}))
    assert float(threat.size(x_adv - x).max()) <= threat.eps + 1e-6
    assert int(wrong(model, x_adv, y).sum()) > 0


class Retyped(nn.Module):
    """A network whose logits have a type of their own, as those of an ensemble summed in float64."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits.to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_logits_may_have_another_type_than_inputs(
    dtype: torch.dtype, attack_row: Row, threat: Threat, conv_net: Make, images: Make, right_labels: Make
) -> None:
    (name, options), model, x = attack_row, conv_net(dtype=torch.float32), images(8, dtype=torch.float32)
    y = right_labels(model, x)
    x_adv = attack(name, Retyped(model, dtype), x, y, threat, **options)
    assert x_adv.dtype == x.dtype
    assert float(threat.size(x_adv - x).max()) <= threat.eps + 1e-6


@pytest.mark.parametrize("threat", [Linf(1e-8), L2(1e-8)], ids=["linf", "l2"])
def test_steps_are_not_rounded_to_the_type_of_logits(threat: Threat) -> None:
    x, y = torch.zeros(1, 4), torch.tensor([0])
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0], [1.0]]).expand(2, 4) * 1e6)
        model.bias.copy_(torch.tensor([0.01, 0.0]))
    assert int(wrong(model, attack("apgd-ce", Retyped(model, torch.float16), x, y, threat, steps=5), y)) == 1


def test_attacks_work_where_gradients_are_switched_off(conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images(8)
    y = right_labels(model, x)
    expected = attack("pgd", model, x, y, Linf(0.03), steps=3)
    with torch.no_grad():
        assert torch.equal(attack("pgd", model, x, y, Linf(0.03), steps=3), expected)


def test_the_input_is_not_changed(conv_net: Make, images: Make, right_labels: Make) -> None:
    model, x = conv_net(), images(8)
    y = right_labels(model, x)
    kept_x, kept_y = x.clone(), y.clone()
    for name in BOUNDED:
        chosen = ATTACKS.make(name, **QUICK.get(name, {}))
        for early_stop in (False, True):
            x_adv = craft(chosen, model, x, y, Linf(0.03), gen_for(x), early_stop=early_stop)
            x_adv += 1
    assert torch.equal(x, kept_x)
    assert torch.equal(y, kept_y)


class Cheat:
    """An attack that breaks the promise it is given."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        return self.change(x)

    def __repr__(self) -> str:
        return "Cheat()"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x + 0.06, r"Cheat\(\) left the linf ball of radius 0.05 by 1.0e-02"),
        (lambda x: x * 0 - 0.01, r"Cheat\(\) left the box"),
        (lambda x: x * torch.nan, r"Cheat\(\) produced NaN"),
        (lambda x: x[:, :1], r"Cheat\(\) changed the shape"),
    ],
)
def test_the_guard_catches_an_attack_that_cheats(change: Callable[[Tensor], Tensor], message: str) -> None:
    x = torch.full((3, 4), 0.02)
    cheat: Attack = Cheat(change)
    with pytest.raises(ThreatError, match=message):
        craft(cheat, nn.Flatten(), x, torch.zeros(3, dtype=torch.int64), Linf(0.05), gen_for(x))
