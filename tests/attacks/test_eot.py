"""Expectation over transformation in PGD: what is averaged, what it costs, and that one pass changes nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_cases import Make, gen_for
from torch import Tensor, nn

from flatrock.attacks.catalog import parse_attack
from flatrock.attacks.gradient import GradientAttack
from flatrock.attacks.losses import cross_entropy, kl
from flatrock.attacks.pgd import Aim, pgd, start_point
from flatrock.core.errors import ConfigError
from flatrock.core.threat import L2, Linf, Threat


class Moody(nn.Module):
    """Answers with one of its networks after the other, as a randomised one would."""

    def __init__(self, *nets: nn.Module) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)
        self.turn = itertools.cycle(range(len(nets)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.nets[next(self.turn)](x)
        return logits


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_one_pass_is_plain_pgd_bit_by_bit(
    conv_net: Make, images: Make, right_labels: Make, threat: Threat, loss: str, early_stop: bool
) -> None:
    model, x = conv_net(dtype=torch.float32), images(dtype=torch.float32)
    y = right_labels(model, x)
    attack = GradientAttack(loss=loss, steps=5, eot=1)
    made = attack(model, x, y, threat, gen_for(x), early_stop=early_stop)
    with torch.no_grad():
        aim = Aim(model, cross_entropy, y, y) if loss == "ce" else Aim(model, kl, F.log_softmax(model(x), 1), y)
    start = start_point(x, threat, gen_for(x).child("restart", 0), start=str(attack.start), noise=1e-3)
    plain = pgd(aim, x, threat, steps=5, step_size=threat.default_step, start=start, early_stop=early_stop)
    assert torch.equal(made, plain)
    assert not torch.equal(made, x)


@pytest.mark.parametrize("options", [{}, {"restarts": 3}, {"loss": "kl"}, {"loss": "cw", "restarts": 2}])
def test_a_steady_network_gains_nothing_and_every_pass_is_counted(
    conv_net: Make, images: Make, right_labels: Make, counting: Make, options: dict[str, Any]
) -> None:
    """The mean of 4 equal numbers is that number, in binary too."""
    x = images(20)
    y = right_labels(conv_net(), x)
    points = []
    for eot in (1, 4):
        model = counting(conv_net())
        attack = GradientAttack(steps=3, eot=eot, **options)
        points.append(attack(model, x, y, Linf(0.03), gen_for(x)))
        assert model.passes == attack.passes(4)
    assert attack.passes(4) == 4 * GradientAttack(steps=3, **options).passes(4)
    # The clean distribution of kl goes through exp and log.
    assert torch.allclose(*points, atol=0 if options.get("loss") != "kl" else 1e-9, rtol=0)


def test_gradient_and_logits_are_means(conv_net: Make, images: Make, right_labels: Make) -> None:
    nets = [conv_net(seed=s) for s in range(3)]
    x = images(10)
    y = right_labels(nets[0], x)
    aim = GradientAttack(eot=3)._aim(Moody(*nets), x, y)[torch.arange(2, 7)]
    grad, logits = aim.gradient(x[2:7])
    each = [Aim(net, cross_entropy, y[2:7], y[2:7]).gradient(x[2:7]) for net in nets]
    assert torch.allclose(grad, sum(g for g, _ in each) / 3, atol=1e-15)
    assert torch.allclose(logits, sum(z for _, z in each) / 3, atol=1e-14)
    loss, harm = aim.at(x[2:7])
    assert torch.allclose(loss, sum(cross_entropy(z, y[2:7]) for _, z in each) / 3, atol=1e-14)
    assert torch.equal(harm > 0, logits.argmax(1) != y[2:7])


def test_the_clean_distribution_of_kl_is_the_mean_of_distributions(conv_net: Make, images: Make) -> None:
    nets = [conv_net(seed=s) for s in range(3)]
    x = images(6)
    with torch.no_grad():
        mean = torch.stack([net(x).softmax(1) for net in nets]).mean(0)
    target = GradientAttack(loss="kl", eot=3)._aim(Moody(*nets), x, torch.zeros(6, dtype=torch.int64)).target
    assert torch.allclose(target.exp(), mean, atol=1e-15)


@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.5)], ids=["linf", "l2"])
def test_averaged_gradients_break_what_single_draws_do_not(threat: Threat) -> None:
    """Every other pass points the wrong way, a little less: single draws go to and fro, their mean goes up."""
    right, back = nn.Linear(8, 2, bias=False).double(), nn.Linear(8, 2, bias=False).double()
    with torch.no_grad():
        right.weight.copy_(torch.stack([torch.ones(8), -torch.ones(8)]))
        back.weight.copy_(-0.8 * right.weight)
    x = torch.full((4, 8), 0.5, dtype=torch.float64)
    y = torch.zeros(4, dtype=torch.int64)

    def drop(eot: int) -> float:
        attack = GradientAttack(loss="margin", steps=10, start="zero", eot=eot)
        x_adv = attack(Moody(right, back), x, y, threat, gen_for(x))
        with torch.no_grad():
            return float((right(x) - right(x_adv))[:, 0].min())

    assert drop(2) == pytest.approx(0.8 if threat.norm == "linf" else 0.5 * 8**0.5)
    assert abs(drop(1)) < 1e-9


def test_named_by_text() -> None:
    label, attack = parse_attack("pgd-20:eot=10")
    assert (label, attack) == ("pgd-20:eot=10", GradientAttack(steps=20, eot=10))
    assert parse_attack({"name": "cw", "steps": 5, "eot": 2})[1] == GradientAttack(loss="cw", steps=5, eot=2)
    with pytest.raises(ConfigError, match=r"unknown option of attack 'pgd': 'eto'.*did you mean 'eot'"):
        parse_attack("pgd-20:eto=10")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_bad_numbers_of_passes(value: Any) -> None:
    with pytest.raises(ConfigError, match="eot must be a whole number >= 1, got"):
        GradientAttack(eot=value)
