"""Weight averaging against closed forms: decays, ramp, plain mean, start, aliasing, and a stop half-way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.hooks import Moment
from flatrock.core.rng import Seed
from flatrock.flatness.swa import SWA


def moment(step: int, total: int = 100) -> Moment:
    return Moment(epoch=1, step=step, share=step / (total - 1), seed=Seed(0))


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)


def path(model: nn.Module, steps: int) -> list[dict[str, Tensor]]:
    """Random weights, one set per step."""
    gen = Seed(5).generator()
    return [
        {n: torch.randn(p.shape, generator=gen, dtype=p.dtype) for n, p in model.named_parameters()}
        for _ in range(steps)
    ]


def put(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])


def run(swa: SWA, model: nn.Module, weights: list[dict[str, Tensor]], *, first: int = 0, total: int = 100) -> None:
    for step, now in enumerate(weights, start=first):
        put(model, now)
        swa.after_step(model, moment(step, total))


def expect(swa: SWA, weights: list[dict[str, Tensor]], shares: list[float]) -> None:
    """The average is the sum of shares[i] * weights[i], every parameter."""
    assert sum(shares) == pytest.approx(1, abs=1e-12)
    assert swa.average().keys() == weights[0].keys()
    for name, got in swa.average().items():
        by_hand = sum(s * w[name] for s, w in zip(shares, weights, strict=True))
        torch.testing.assert_close(got, by_hand, rtol=0, atol=1e-14)


def shares_of(decays: list[float]) -> list[float]:
    """Shares of theta_0..theta_n in the average when decays[t - 1] belongs to update t: products, no recursion."""
    shares = []
    for i in range(len(decays) + 1):
        share = 1.0 if i == 0 else 1 - decays[i - 1]
        for d in decays[i:]:
            share *= d
        shares.append(share)
    return shares


def test_from_zero_toward_one() -> None:
    """1 - 0.995^10 after ten updates."""
    model = nn.Linear(3, 2).double()
    swa = SWA()
    zeros = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    ones = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    run(swa, model, [zeros, *[ones] * 10])
    for got in swa.average().values():
        torch.testing.assert_close(got, torch.full_like(got, 0.0488898695), rtol=0, atol=5e-11)
        torch.testing.assert_close(got, torch.full_like(got, 1 - 0.995**10), rtol=0, atol=1e-15)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.995])
def test_exponential_average(decay: float) -> None:
    """d^n theta_0 + (1 - d) sum_i d^(n - 1 - i) theta_(i + 1)."""
    model, swa, n = network(), SWA(decay=decay), 12
    weights = path(model, n + 1)
    run(swa, model, weights)
    expect(swa, weights, [decay**n, *[(1 - decay) * decay ** (n - 1 - i) for i in range(n)]])


def test_equal_weights() -> None:
    model, swa = network(), SWA(decay=None)
    weights = path(model, 9)
    run(swa, model, weights)
    expect(swa, weights, [1 / 9] * 9)


@pytest.mark.parametrize("decay", [0.3, 0.995])
def test_ramp(decay: float) -> None:
    """2/11, 3/12, ... up to the decay; with 0.3 the ramp ends inside the test."""
    model, swa = network(), SWA(decay=decay, ramp=True)
    weights = path(model, 8)
    run(swa, model, weights)
    ramp = [2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 7 / 16, 8 / 17]
    expect(swa, weights, shares_of([min(decay, r) for r in ramp]))


def test_the_long_end_of_the_ramp_is_the_decay() -> None:
    swa = SWA(ramp=True)
    assert swa.decay_at(1789) < 0.995  # 1790/1799
    assert [swa.decay_at(t) for t in (1790, 1791, 10**6)] == [0.995] * 3


def test_decay_zero_is_the_live_model() -> None:
    model, swa = network(torch.float32), SWA(decay=0.0)
    run(swa, model, path(model, 5))
    assert all(torch.equal(swa.average()[n], p) for n, p in model.named_parameters())


def test_weights_that_never_move_average_to_themselves() -> None:
    model, swa = network(torch.float32), SWA()
    run(swa, model, path(model, 1) * 50)
    assert all(torch.equal(swa.average()[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "decays"),
    [
        ({"decay": 0.9}, [0.9] * 4),
        ({"decay": None}, [1 / 2, 2 / 3, 3 / 4, 4 / 5]),
        ({"ramp": True}, [2 / 11, 3 / 12, 4 / 13, 5 / 14]),
    ],
)
def test_start(options: dict[str, Any], decays: list[float]) -> None:
    """Eleven steps have shares 0, .1, ..., 1: a copy before .6, begun afresh there, four updates after it."""
    model, swa = network(), SWA(start=0.6, **options)
    weights = path(model, 11)
    for step, now in enumerate(weights):
        run(swa, model, [now], first=step, total=11)
        same = [torch.equal(swa.average()[n], p) for n, p in model.named_parameters()]
        assert all(same) if step <= 6 else not any(same)
    expect(swa, weights[6:], shares_of(decays))


def test_only_float_parameters_are_averaged() -> None:
    model = network()
    model.register_parameter("table", nn.Parameter(torch.arange(4), requires_grad=False))
    swa = SWA()
    assert swa.average() == {}
    swa.after_step(model, moment(0))
    assert set(swa.average()) == {n for n, _ in model.named_parameters()} - {"table"}
    assert not any("running" in n for n in swa.average())


def test_nothing_is_shared_with_the_live_weights() -> None:
    model, swa = network(), SWA()
    run(swa, model, path(model, 3))
    live = {p.data_ptr() for p in model.parameters()}
    assert not live & {t.data_ptr() for t in swa.average().values()}
    assert not any(t.requires_grad for t in swa.average().values())
    before = {n: t.clone() for n, t in swa.average().items()}
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
    assert all(torch.equal(before[n], t) for n, t in swa.average().items())
    put(model, weights)
    swa.after_step(model, moment(3))
    assert all(torch.equal(weights[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    "make",
    [SWA, lambda: SWA(decay=None), lambda: SWA(ramp=True), lambda: SWA(start=0.6), lambda: SWA(start=0.2, ramp=True)],
)
def test_a_stop_changes_no_bit(make: Callable[[], SWA]) -> None:
    model, straight = network(torch.float32), make()
    weights = path(model, 21)
    run(straight, model, weights, total=21)
    for stop in (0, 1, 4, 5, 12, 13, 20):
        before, after = make(), make()
        run(before, model, weights[:stop], total=21)
        kept = before.state()
        run(before, model, weights[stop:], total=21)  # goes on: what was kept must not move with it
        after.restore(kept)
        run(after, model, weights[stop:], first=stop, total=21)
        assert all(torch.equal(t, after.average()[n]) for n, t in straight.average().items())
        assert torch.equal(straight.state()["updates"], after.state()["updates"])


def test_state_holds_tensors_only_and_nothing_before_the_first_step() -> None:
    model, swa = network(), SWA()
    assert swa.state() == {}
    run(swa, model, path(model, 3))
    assert all(isinstance(t, Tensor) for t in swa.state().values())
    assert int(swa.state()["updates"]) == 3
    swa.restore({})
    assert (swa.average(), swa.state()) == ({}, {})


def test_the_average_of_another_model_is_refused() -> None:
    swa = SWA()
    swa.after_step(nn.Linear(3, 2), moment(0))
    with pytest.raises(StateError, match=r"does not fit this model, first \['weight'\]"):
        swa.after_step(nn.Linear(4, 2), moment(1))
    with pytest.raises(StateError, match=r"'0\.bias', '0\.weight'"):
        swa.after_step(network(), moment(1))


def test_what_it_tells_the_engine() -> None:
    assert SWA.averages
    assert not SWA.moves_weights
    assert SWA().passes(2, 10) == 0
    assert SWA(batches=7).bn_batches == 0
    assert SWA(bn="recompute").bn_batches == 50
    assert SWA(bn="recompute", batches=7).bn_batches == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, "swa decay must be below 1, got 1.0"),
        ({"decay": -0.1}, "swa decay must be a number >= 0, got -0.1"),
        ({"decay": "0.9"}, "swa decay must be a number >= 0, got '0.9'"),
        ({"start": 1}, "swa start must be below 1, got 1"),
        ({"start": float("nan")}, "swa start must be a number >= 0, got nan"),
        ({"ramp": 1}, "swa ramp must be true or false, got 1"),
        ({"ramp": True, "decay": None}, "needs a decay to ramp up to, got decay None"),
        ({"bn": "copied"}, "unknown swa bn 'copied'; known: copy, recompute; did you mean 'copy'"),
        ({"batches": 0}, "swa batches must be a whole number >= 1, got 0"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SWA(**options)


@pytest.mark.gpu
def test_a_restored_average_follows_the_model_to_its_device() -> None:
    here, there = network(torch.float32), network(torch.float32).cuda()
    weights = path(here, 6)
    straight, moved = SWA(decay=0.9), SWA(decay=0.9)
    run(straight, there, weights)
    run(moved, here, weights[:3])
    moved.restore(moved.state())
    run(moved, there, weights[3:], first=3)
    for name, got in moved.average().items():
        assert got.device.type == "cuda"
        torch.testing.assert_close(got, straight.average()[name])


def test_a_restored_average_takes_the_layout_of_the_weights() -> None:
    """One kernel moves all tensors only if both are laid out alike."""
    model = nn.Conv2d(3, 4, 3, bias=False)
    average = SWA(decay=0.9)
    run(average, model, [{"weight": model.weight.detach().clone()}])
    average.restore(average.state())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = average.average()["weight"].clone()
    run(average, model, [{"weight": model.weight.detach() + 1}], first=1)
    after = average.average()["weight"]
    assert after.stride() == model.weight.stride()
    torch.testing.assert_close(after, 0.9 * before + 0.1 * model.weight.detach())
