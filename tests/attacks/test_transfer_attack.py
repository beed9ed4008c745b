"""Transfer: crafted on the surrogate, which comes back untouched; the model is never asked."""

from __future__ import annotations

import copy

import pytest
import torch
from attack_cases import Make, gen_for
from torch import Tensor, nn

from flatrock.attacks.auto_pgd import APGDTargeted
from flatrock.attacks.craft import craft
from flatrock.attacks.gradient import GradientAttack
from flatrock.attacks.langevin import Langevin
from flatrock.attacks.transfer import Transfer
from flatrock.core.threat import Linf, Threat


class Silent(nn.Module):
    """Must not be asked."""

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the model was queried")


@pytest.mark.parametrize("by", [GradientAttack(steps=4), GradientAttack(loss="cw", steps=3, restarts=2)])
def test_it_is_the_attack_on_the_surrogate(
    conv_net: Make, images: Make, right_labels: Make, threat: Threat, by: GradientAttack
) -> None:
    surrogate, x = conv_net(seed=1), images(20)
    y = right_labels(conv_net(), x)
    x_adv = craft(Transfer(surrogate, by), Silent(), x, y, threat, gen_for(x))
    assert torch.equal(x_adv, craft(by, surrogate, x, y, threat, gen_for(x)))
    assert not torch.equal(x_adv, x)


def test_no_sample_stops_early(conv_net: Make, images: Make, right_labels: Make, counting: Make) -> None:
    """What breaks the surrogate need not break the model: every sample is climbed to the end."""
    surrogate, x = counting(conv_net()), images(20)
    y = right_labels(conv_net(), x)
    attack = Transfer(surrogate, GradientAttack(steps=6))
    whole = attack(Silent(), x, y, Linf(0.1), gen_for(x))
    surrogate.samples = 0
    assert torch.equal(attack(Silent(), x, y, Linf(0.1), gen_for(x), early_stop=True), whole)
    assert surrogate.samples == 6 * 20
    stopped = attack.by(conv_net(), x, y, Linf(0.1), gen_for(x), early_stop=True)
    assert not torch.equal(stopped, whole), "the attack itself would have stopped"


def test_the_surrogate_is_given_back_untouched(conv_net: Make, images: Make, right_labels: Make) -> None:
    surrogate, x = conv_net(seed=1), images(20)
    y = right_labels(surrogate, x)
    surrogate.train()
    surrogate.body[1].eval()
    surrogate.head.weight.requires_grad_(False)
    modes = [m.training for m in surrogate.modules()]
    grads = [p.requires_grad for p in surrogate.parameters()]
    before = copy.deepcopy(surrogate.state_dict())
    attack = Transfer(surrogate, GradientAttack(steps=2))
    x_adv = attack(Silent(), x, y, Linf(0.1), gen_for(x))
    assert [m.training for m in surrogate.modules()] == modes
    assert [p.requires_grad for p in surrogate.parameters()] == grads
    assert all(p.grad is None for p in surrogate.parameters())
    assert all(torch.equal(v, before[k]) for k, v in surrogate.state_dict().items())
    assert torch.equal(x_adv, attack(Silent(), x, y, Linf(0.1), gen_for(x))), "in eval mode"


def test_it_says_what_its_attack_says(conv_net: Make) -> None:
    surrogate = conv_net()
    for by in (GradientAttack(), GradientAttack(loss="cw"), APGDTargeted(), Langevin(project="never")):
        attack = Transfer(surrogate, by)
        assert (attack.mixed_labels, attack.bounded) == (by.mixed_labels, by.bounded)
        assert attack.passes(10) == by.passes(10)
    assert repr(Transfer(surrogate, GradientAttack(steps=3))).startswith(
        "Transfer(by=GradientAttack(loss='ce', steps=3"
    )
