"""Attacks of one's own that write where they should not: the samples they are judged by, and the caller's, stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatrock
from flatrock.core.errors import ThreatError
from flatrock.core.threat import Linf

THREAT = Linf(0.1)


@pytest.fixture
def samples(digits: Any) -> tuple[Tensor, Tensor]:
    return digits.test_x[:40].clone(), digits.test_y[:40].clone()


def relabels(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    y.add_(1).remainder_(10)
    return x.clone()


def steps_in_place(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    return x.add_(0.5 * threat.eps).clamp_(0, 1)


def numpys(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    x.numpy()[...] = 0.5
    return x


def data(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    x.data.clamp_(0.5, 1)
    return x


def still(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    return x.clone()


def steps(model: nn.Module, x: Tensor, y: Tensor, threat: Any, gen: Any) -> Tensor:
    return (x + 0.5 * threat.eps).clamp(0, 1)


@pytest.mark.parametrize(("writes", "same"), [(relabels, still), (steps_in_place, steps)])
def test_an_attack_is_judged_by_the_samples_it_was_given(
    digits_model: nn.Module, samples: tuple[Tensor, Tensor], writes: Callable[..., Tensor], same: Callable[..., Tensor]
) -> None:
    x, y = samples
    result = flatrock.evaluate(digits_model, x, y, THREAT, attacks=[writes, same], keep_adversarial=True)
    assert torch.equal(result.flags[writes.__name__], result.flags[same.__name__])
    given = x.clone(), y.clone()
    made = [flatrock.attack(one, digits_model, x, y, THREAT) for one in (writes, same)]
    assert torch.equal(made[0], made[1])
    assert torch.equal(x, given[0])
    assert torch.equal(y, given[1]), "what belongs to the caller stays as it is"


@pytest.mark.parametrize("writes", [numpys, data])
def test_who_leaves_the_ball_in_place_is_seen(
    digits_model: nn.Module, samples: tuple[Tensor, Tensor], writes: Callable[..., Tensor]
) -> None:
    x, y = samples
    given = x.clone()
    with pytest.raises(ThreatError, match=r"left the linf ball of radius 0.1 by 4.0e-01"):
        flatrock.evaluate(digits_model, x, y, THREAT, attacks=[writes])
    with pytest.raises(ThreatError, match=r"left the linf ball of radius 0.1 by 4.0e-01"):
        flatrock.attack(writes, digits_model, x, y, THREAT)
    assert torch.equal(x, given)
