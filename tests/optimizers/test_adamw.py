"""AdamW: torch's own bit by bit, the formula in double precision, and the fused step in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attack_cases import Waits, gpu_waits
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.optimizers.adamw import MOMENTS, FusedAdamW
from flatrock.optimizers.catalog import OPTIMIZERS, lacks

OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = Seed(4).generator()
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_(True) for s in ((4, 3), (5,), (2, 6))]


def grads_of(step: int, params: list[Tensor], *, missing: bool = False, turned: bool = False) -> list[Tensor | None]:
    """Gradients of a step; with `missing` each parameter in turn has none, with `turned` they lie transposed."""
    generator = Seed(5).child(step).generator()
    found: list[Tensor | None] = []
    for i, p in enumerate(params):
        shape = p.shape[::-1] if turned else p.shape
        grad = torch.randn(shape, generator=generator, dtype=p.dtype)
        found.append(None if missing and step == i else grad.permute(*range(p.dim())[::-1]) if turned else grad)
    return found


def stepped(optimizer: torch.optim.Optimizer, params: list[Tensor], steps: int = 5, **how: bool) -> list[Tensor]:
    for step in range(steps):
        for p, grad in zip(params, grads_of(step, params, **how), strict=True):
            p.grad = grad
        optimizer.step()
    return [p.detach() for p in params]


def test_it_is_torch_adamw_bit_by_bit() -> None:
    """Decay of each group its own, as recipes give it."""
    mine, theirs = leaves(), leaves()

    def groups(params: list[Tensor]) -> list[dict[str, Any]]:
        return [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]

    a = OPTIMIZERS.make("adamw", params=groups(mine), seed=Seed(0), **OPTIONS)
    b = torch.optim.AdamW(groups(theirs), **OPTIONS)
    assert type(a) is torch.optim.AdamW
    for p, q in zip(stepped(a, mine, missing=True), stepped(b, theirs, missing=True), strict=True):
        assert torch.equal(p, q)
    for one, two in zip(a.param_groups, b.param_groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in two.items() if k != "params"}


@pytest.mark.parametrize("betas", [(0.8, 0.95), (0.0, 0.5), [0, 0.9]])
def test_it_is_the_formula(betas: Any) -> None:
    """Written out in double precision: decay of the weight before the step, moments freed of their start at 0."""
    params = leaves(torch.float64)
    expected = [p.detach().numpy().copy() for p in params]
    m, v = ([np.zeros_like(w) for w in expected] for _ in range(2))
    optimizer = OPTIMIZERS.make("adamw", params=params, **{**OPTIONS, "betas": betas})
    stepped(optimizer, params, 6)
    lr, (b1, b2) = OPTIONS["lr"], betas
    for t in range(1, 7):
        for i, grad in enumerate(grads_of(t - 1, params)):
            assert grad is not None
            g = grad.numpy()
            m[i], v[i] = b1 * m[i] + (1 - b1) * g, b2 * v[i] + (1 - b2) * g * g
            expected[i] -= lr * OPTIONS["weight_decay"] * expected[i]
            expected[i] -= lr * (m[i] / (1 - b1**t)) / (np.sqrt(v[i] / (1 - b2**t)) + OPTIONS["eps"])
    for got, w in zip(params, expected, strict=True):
        np.testing.assert_allclose(got.detach().numpy(), w, rtol=0, atol=1e-13)


@pytest.mark.parametrize("turned", [False, True])
def test_the_fused_step_is_the_plain_one(turned: bool) -> None:
    """Also for gradients that stay away for a step, and for those that are laid out otherwise."""
    plain, fused = leaves(), leaves()
    stepped(torch.optim.AdamW(plain, **OPTIONS), plain, missing=True, turned=turned)
    stepped(FusedAdamW(fused, **OPTIONS), fused, missing=True, turned=turned)
    for p, q in zip(plain, fused, strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)


def test_the_fused_step_goes_on_in_the_layout_of_the_weights() -> None:
    """From a state as a file, which only keeps values, gives it back: moments contiguous, weights channels last."""

    def made() -> nn.Module:
        model = nn.Conv2d(3, 4, 3)
        generator = Seed(1).generator()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        return model

    plain, fused = made(), made().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.rand(2, 3, 4, 4, generator=Seed(2).generator())
    first, second = torch.optim.AdamW(plain.parameters(), **OPTIONS), FusedAdamW(fused.parameters(), **OPTIONS)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    for _ in range(3):
        step(plain, first)
    state = {i: {k: v.clone() for k, v in one.items()} for i, one in first.state_dict()["state"].items()}
    second.load_state_dict({"state": state, "param_groups": second.state_dict()["param_groups"]})
    fused.load_state_dict(plain.state_dict())
    weight = fused.weight
    assert isinstance(weight, nn.Parameter)
    assert second.state[weight]["exp_avg"].stride() != weight.stride()
    for _ in range(3):
        step(plain, first)
        step(fused, second)
    assert all(second.state[weight][name].stride() == weight.stride() for name in MOMENTS)
    for p, q in zip(plain.parameters(), fused.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)


def test_the_fused_step_reads_no_number() -> None:
    """The plain one asks how many updates there were, of a tensor that is always on the CPU; the fused one nobody."""
    params = leaves()
    optimizer = FusedAdamW(params, **OPTIONS)
    stepped(optimizer, params, 1)
    with Waits() as waits:
        optimizer.step()
    assert waits.found == []


@pytest.mark.gpu
def test_on_a_gpu_it_is_fused_and_nobody_waits() -> None:
    plain, fused = leaves(), [p.detach().cuda().requires_grad_(True) for p in leaves()]
    optimizer = OPTIMIZERS.make("adamw", params=fused, **OPTIONS)
    assert isinstance(optimizer, FusedAdamW)
    waits = []
    for step in range(4):
        for p, grad in zip(fused, grads_of(step, plain), strict=True):
            assert grad is not None
            p.grad = grad.cuda()
        waits.append(gpu_waits(optimizer.step))
    assert waits[1:] == [0] * 3, "the first one makes its state"
    for p, q in zip(stepped(torch.optim.AdamW(plain, **OPTIONS), plain, 4), fused, strict=True):
        assert torch.allclose(p, q.cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, "adamw lr must be a number >= 0, got -1"),
        ({"eps": "small"}, "adamw eps must be a number >= 0, got 'small'"),
        ({"weight_decay": float("inf")}, "adamw weight_decay must be a number >= 0, got inf"),
        ({"betas": 0.9}, r"adamw betas must be two numbers, got 0.9; write \[0.9, 0.999\]"),
        ({"betas": [0.9, 0.99, 0.999]}, "adamw betas must be two numbers"),
        ({"betas": [0.9, 1.0]}, r"adamw betas must lie in \[0, 1\), got 1.0"),
        ({"betas": [0.9, "x"]}, "adamw betas must be a number >= 0, got 'x'"),
        ({"momentum": 0.9}, "option of optimizer 'adamw': 'momentum'"),
        ({"amsgrad": True}, "option of optimizer 'adamw': 'amsgrad'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OPTIMIZERS.make("adamw", **{"params": leaves(), "lr": 0.1, **options})


def test_who_lacks_what() -> None:
    found = {name: [o for o in ("momentum", "nesterov") if lacks(name, o)] for name in OPTIMIZERS.names()}
    both = ["momentum", "nesterov"]
    assert found == {"sgd": [], "adamw": both, "entropy_sgd": [], "sgld": both}
    assert not lacks("mymethods:Adam", "momentum"), "only its code knows"
    assert not lacks(["adamw"], "momentum"), "what is no name is told of elsewhere"
