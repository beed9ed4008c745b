"""SGLD: the stationary law on a Gaussian target, plain SGD without noise, and noise that belongs to seed and place."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.optimizers.sgld import SGLD, gaussians


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    gen = Seed(2).generator()
    return [torch.randn(s, generator=gen, dtype=dtype).requires_grad_(True) for s in shapes]


def pull(params: list[Tensor], to: float, strength: float = 1.0) -> None:
    """The gradient of strength/2 * sum (w - to)^2."""
    for p in params:
        p.grad = strength * (p.detach() - to)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_the_stationary_law_of_a_gaussian_target(temperature: float) -> None:
    """Batch-mean loss k/2 (w - a)^2 of N samples and a prior of precision q: the posterior is Gaussian.

    Precision P = N k + q, mean N k a / P; the chain's variance is T / (P (1 - lr P / 2)), T / P up to discretisation.
    """
    samples, k, a, prior, lr, count = 50, 0.1, 2.0, 1.0, 0.05, 40_000
    precision = samples * k + prior
    theta = torch.zeros(count, dtype=torch.float64, requires_grad=True)
    sgld = SGLD([theta], lr=lr, weight_decay=prior, scale=samples, noise=math.sqrt(temperature), seed=Seed(1))
    for _ in range(70):  # 0.7^70 = 1e-11 of the start is left
        pull([theta], a, k)
        sgld.step()
    variance = temperature / (precision * (1 - lr * precision / 2))
    mean = samples * k * a / precision
    got = theta.detach()
    assert abs(float(got.mean()) - mean) < 5 * math.sqrt(variance / count)
    assert abs(float(got.var()) - variance) < 5 * variance * math.sqrt(2 / count)
    assert abs(float(got.var()) - temperature / precision) > 5 * variance * math.sqrt(2 / count)  # the test can tell
    fourth = float(((got - mean) / math.sqrt(variance)).pow(4).mean())
    assert abs(fourth - 3) < 5 * math.sqrt(96 / count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_noise_it_is_sgd_bit_by_bit(dtype: torch.dtype, decay: float) -> None:
    mine, theirs = leaves((5, 3), (4,), (), dtype=dtype), leaves((5, 3), (4,), (), dtype=dtype)
    a = SGLD(mine, lr=0.3, weight_decay=decay, noise=0.0, seed=Seed(0))
    b = torch.optim.SGD(theirs, lr=0.3, weight_decay=decay)
    for _ in range(5):
        for params, optimizer in ((mine, a), (theirs, b)):
            pull(params, 0.7)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


def test_one_step_by_hand() -> None:
    """The scale multiplies the gradient, not the decay; noise has width noise * sqrt(2 lr)."""
    lr, decay, scale, noise = 0.02, 0.5, 7.0, 0.3
    params = leaves((4, 2), (3,))
    before = [p.detach().clone() for p in params]
    sgld = SGLD(params, lr=lr, weight_decay=decay, scale=scale, noise=noise, seed=Seed(9))
    pull(params, 1.0)
    sgld.step()
    random = gaussians(Seed(9).child(0), before)
    for p, w in zip(params, before, strict=True):
        by_hand = w - lr * (scale * (w - 1.0) + decay * w) + noise * math.sqrt(2 * lr) * random[w]
        torch.testing.assert_close(p.detach(), by_hand, rtol=0, atol=1e-14)


def test_noise_is_one_sequence_over_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into blocks, the same on every call, shaped and typed like each tensor."""
    monkeypatch.setattr("flatrock.optimizers.sgld._BLOCK", 5)
    like = [torch.zeros(2, 3, dtype=torch.float64), torch.zeros((), dtype=torch.float64), torch.zeros(4)]
    drawn = gaussians(Seed(1), like)
    blocks = [
        Seed(1).child(i).samples(torch.zeros(1, dtype=torch.int64)).normal(torch.zeros(1, n, dtype=torch.float64))[0]
        for i, n in enumerate((5, 5, 1))
    ]
    sequence = torch.cat([drawn[p].double().flatten() for p in like])
    torch.testing.assert_close(sequence, torch.cat(blocks), rtol=1e-7, atol=0)
    assert torch.equal(sequence[:7], torch.cat(blocks)[:7])
    assert all(drawn[p].shape == p.shape and drawn[p].dtype == p.dtype for p in like)


def test_noise_is_fresh_for_every_parameter_and_update() -> None:
    params = [torch.zeros(1000, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    sgld = SGLD(params, lr=0.5, seed=Seed(3))
    seen = []
    for _ in range(2):
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.zeros_like(p)
        sgld.step()
        seen += [p.detach() - w for p, w in zip(params, before, strict=True)]
    table = torch.corrcoef(torch.stack(seen)) - torch.eye(4, dtype=torch.float64)
    assert float(table.abs().max()) < 5 / math.sqrt(1000)


def test_global_generators_are_left_alone() -> None:
    params = leaves((3,))
    sgld = SGLD(params, lr=0.1, seed=Seed(0))
    pull(params, 0.0)
    before = torch.get_rng_state()
    sgld.step()
    assert torch.equal(before, torch.get_rng_state())


def test_a_stop_changes_no_bit() -> None:
    straight, first = leaves((4, 3), (3,)), leaves((4, 3), (3,))
    one, two = SGLD(straight, lr=0.1, seed=Seed(4)), SGLD(first, lr=0.1, seed=Seed(4))
    for step in range(9):
        pull(straight, 1.0)
        one.step()
        pull(first, 1.0)
        two.step()
        if step == 4:
            kept = json.loads(json.dumps(two.state_dict()["state"]))  # nothing but plain numbers
            first = [p.detach().clone().requires_grad_(True) for p in first]
            two = SGLD(first, lr=0.1, seed=Seed(4))
            groups = two.state_dict()["param_groups"]
            two.load_state_dict({"state": {int(i): s for i, s in kept.items()}, "param_groups": groups})
    assert all(torch.equal(p, q) for p, q in zip(straight, first, strict=True))


def test_groups_have_their_own_decay_and_learning_rate() -> None:
    a, b, c = leaves((3,), (3,), (3,))
    start = [p.detach().clone() for p in (a, b, c)]
    groups: list[dict[str, Any]] = [
        {"params": [a], "weight_decay": 0.5},
        {"params": [b], "lr": 0.2},
        {"params": [c], "lr": 0.0},
    ]
    sgld = SGLD(groups, lr=0.1, noise=0.0, seed=Seed(0))
    pull([a, b, c], 0.0)
    sgld.step()
    torch.testing.assert_close(a.detach(), start[0] * (1 - 0.1 * 1.5), rtol=0, atol=1e-15)
    torch.testing.assert_close(b.detach(), start[1] * (1 - 0.2), rtol=0, atol=1e-15)
    assert torch.equal(c.detach(), start[2])


def test_no_learning_rate_no_noise_and_no_gradient_no_step() -> None:
    still, idle = leaves((3,), (3,))
    before = [still.detach().clone(), idle.detach().clone()]
    groups: list[dict[str, Any]] = [{"params": [still], "lr": 0.0}, {"params": [idle]}]
    sgld = SGLD(groups, lr=0.1, seed=Seed(0))
    pull([still], 5.0)
    sgld.step()
    assert torch.equal(still.detach(), before[0])
    assert torch.equal(idle.detach(), before[1])


def test_a_closure_is_called_once_with_gradients_on() -> None:
    (w,) = leaves((3,))
    start = w.detach().clone()
    sgld = SGLD([w], lr=0.1, noise=0.0, seed=Seed(0))
    calls = []

    def closure() -> float:
        sgld.zero_grad()
        loss = w.square().sum() / 2
        loss.backward()
        calls.append(loss.item())
        return loss.item()

    assert sgld.step(closure) == calls[0]
    assert len(calls) == 1
    torch.testing.assert_close(w.detach(), 0.9 * start, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "scale", "noise"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), "1", True, None])
def test_numbers_that_are_refused(name: str, value: Any) -> None:
    options: dict[str, Any] = {"lr": 0.1, name: value}
    with pytest.raises(ConfigError, match=f"sgld {name} must be a number >= 0, got {value!r}"):
        SGLD(leaves((2,)), seed=Seed(0), **options)


def test_a_seed_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sgld seed must be a Seed, got 3; write for example Seed\(0\)"):
        SGLD(leaves((2,)), lr=0.1, seed=3)  # type: ignore[arg-type]
