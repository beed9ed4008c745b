"""The optimizers by name: their options, torch's own SGD untouched, groups, training with a stop, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.optimizers.catalog import OPTIMIZERS, FusedSGD, own_options
from flatrock.optimizers.entropy_sgd import EntropySGD
from flatrock.optimizers.sgld import SGLD


def leaves() -> list[Tensor]:
    gen = Seed(2).generator()
    return [torch.randn(4, 3, generator=gen).requires_grad_(True), torch.randn(3, generator=gen).requires_grad_(True)]


def groups(params: list[Tensor]) -> list[dict[str, Any]]:
    """As recipes give them: decay on weights, none on biases."""
    return [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("sgd", torch.optim.SGD, ("lr", "momentum", "weight_decay", "nesterov")),
        ("adamw", torch.optim.AdamW, ("lr", "betas", "eps", "weight_decay")),
        (
            "entropy_sgd",
            EntropySGD,
            (
                *("lr", "momentum", "weight_decay", "nesterov", "steps", "inner_lr", "gamma", "gamma_growth"),
                *("alpha", "noise", "outer"),
            ),
        ),
        ("sgld", SGLD, ("lr", "weight_decay", "scale", "noise")),
    ],
)
def test_every_row(name: str, kind: type, options: tuple[str, ...]) -> None:
    assert own_options(name) == options
    assert OPTIMIZERS.entry(name).options() == ("params", *options, "seed")
    made = OPTIMIZERS.make(name, params=groups(leaves()), lr=0.2, seed=Seed(0))
    assert type(made) is kind
    assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0.0]
    assert [g["lr"] for g in made.param_groups] == [0.2, 0.2]
    assert getattr(made, "inner_loops", 1) == (5 if name == "entropy_sgd" else 1)


def test_the_rows_are_these() -> None:
    assert OPTIMIZERS.names() == ["sgd", "adamw", "entropy_sgd", "sgld"]
    assert all(row.summary for row in OPTIMIZERS)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_torch_sgd_bit_by_bit(nesterov: bool) -> None:
    mine, theirs = leaves(), leaves()
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    a = OPTIMIZERS.make("sgd", params=groups(mine), seed=Seed(1), **options)
    b = torch.optim.SGD(groups(theirs), **options)
    for _ in range(4):
        for params, optimizer in ((mine, a), (theirs, b)):
            for p in params:
                p.grad = p.detach().sin()
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))
    for one, two in zip(a.param_groups, b.param_groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in two.items() if k != "params"}


def test_sgd_needs_no_seed() -> None:
    assert isinstance(OPTIMIZERS.make("sgd", params=leaves(), lr=0.1), torch.optim.SGD)


# Stops, and a real network

TRAINED = [
    ("sgd", {"lr": 0.5, "momentum": 0.9}),
    ("adamw", {"lr": 0.05, "weight_decay": 0.1}),
    ("entropy_sgd", {"lr": 1.0, "momentum": 0.9, "noise": 1e-3, "gamma_growth": 1e-3, "outer": "code"}),
    ("sgld", {"lr": 1.0, "noise": 1e-3}),
]


def network() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    gen = Seed(8).generator()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=gen))
    return net


def moved(optimizer: torch.optim.Optimizer, fresh: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`fresh` with the state of `optimizer`, which went through copies of tensors and the text of plain numbers."""
    state = {
        i: {n: v.clone() if isinstance(v, Tensor) else json.loads(json.dumps(v)) for n, v in values.items()}
        for i, values in optimizer.state_dict()["state"].items()
    }
    fresh.load_state_dict({"state": state, "param_groups": fresh.state_dict()["param_groups"]})
    return fresh


def trained(name: str, options: dict[str, Any], steps: int, *, stop: int | None = None) -> tuple[nn.Module, float]:
    """A net after `steps` updates, its optimizer made anew at `stop`; and its loss."""
    net = network()
    x = torch.randn(64, 2, generator=Seed(6).generator())
    y = (x[:, 0] * x[:, 1] > 0).long()
    optimizer = OPTIMIZERS.make(name, params=net.parameters(), seed=Seed(2), **options)

    def closure() -> None:
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]

    for step in range(steps):
        if step == stop:
            optimizer = moved(optimizer, OPTIMIZERS.make(name, params=net.parameters(), seed=Seed(2), **options))
        closure()
        if getattr(optimizer, "inner_loops", 1) > 1:
            optimizer.step(closure)  # type: ignore[arg-type]
        else:
            optimizer.step()
    return net, nn.functional.cross_entropy(net(x), y).item()


@pytest.mark.parametrize(("name", "options"), TRAINED)
def test_a_stop_changes_no_bit(name: str, options: dict[str, Any]) -> None:
    straight, _ = trained(name, options, 8)
    for stop in (1, 5):
        stopped, _ = trained(name, options, 8, stop=stop)
        assert all(torch.equal(p, q) for p, q in zip(straight.parameters(), stopped.parameters(), strict=True))


@pytest.mark.parametrize(("name", "options"), TRAINED)
def test_it_trains_a_network(name: str, options: dict[str, Any]) -> None:
    _, before = trained(name, options, 0)
    _, after = trained(name, options, 60)
    assert after < 0.5 * before


# Refusals


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sdg", {}, "unknown optimizer 'sdg'; known: adamw, entropy_sgd, sgd, sgld; did you mean 'sgd'"),
        ("sgd", {"momentun": 0.9}, "option of optimizer 'sgd': 'momentun'.*did you mean 'momentum'"),
        ("sgd", {"dampening": 0.1}, "option of optimizer 'sgd': 'dampening'"),
        ("sgd", {"lr": float("nan")}, "sgd lr must be a number >= 0, got nan"),
        ("sgd", {"momentum": 1.2}, "sgd momentum must be below 1, got 1.2"),
        ("sgd", {"weight_decay": -5e-4}, "sgd weight_decay must be a number >= 0, got -0.0005"),
        ("sgd", {"nesterov": True}, "sgd nesterov true needs momentum above 0, got 0.0"),
        ("sgld", {"momentum": 0.9}, "option of optimizer 'sgld': 'momentum'"),
        ("entropy_sgd", {"lr": -0.1}, "entropy_sgd lr must be a number >= 0, got -0.1"),
        ("entropy_sgd", {"momentum": 1.0}, "entropy_sgd momentum must be below 1, got 1.0"),
        ("entropy_sgd", {"weight_decay": None}, "entropy_sgd weight_decay must be a number >= 0, got None"),
        ("entropy_sgd", {"nesterov": True}, "entropy_sgd nesterov true needs momentum above 0, got 0.0"),
        ("entropy_sgd", {"nesterov": "yes"}, "entropy_sgd nesterov must be true or false, got 'yes'"),
        ("entropy_sgd", {"steps": 0}, "entropy_sgd steps must be a whole number >= 1, got 0"),
        ("entropy_sgd", {"steps": 2.5}, "entropy_sgd steps must be a whole number >= 1, got 2.5"),
        ("entropy_sgd", {"inner_lr": 0.0}, "entropy_sgd inner_lr must be above 0, got 0.0"),
        ("entropy_sgd", {"gamma": -1}, "entropy_sgd gamma must be a number >= 0, got -1"),
        ("entropy_sgd", {"gamma": 20.0}, r"inner_lr \* gamma must be below 2, got 0.1 \* 20.0 at update 0"),
        ("entropy_sgd", {"gamma_growth": float("inf")}, "entropy_sgd gamma_growth must be a number >= 0, got inf"),
        ("entropy_sgd", {"alpha": 0}, "entropy_sgd alpha must be above 0 and at most 1, got 0"),
        ("entropy_sgd", {"alpha": 1.5}, "entropy_sgd alpha must be above 0 and at most 1, got 1.5"),
        ("entropy_sgd", {"noise": "1e-4"}, "entropy_sgd noise must be a number >= 0, got '1e-4'"),
        (
            "entropy_sgd",
            {"outer": "papers"},
            "unknown entropy_sgd outer 'papers'; known: code, paper; did you mean 'paper'",
        ),
        ("entropy_sgd", {"seed": 0}, "entropy_sgd seed must be a Seed, got 0"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OPTIMIZERS.make(name, **{"params": leaves(), "lr": 0.1, "seed": Seed(0), **options})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_fused_step_is_the_plain_one(momentum: float, nesterov: bool) -> None:
    """Also for gradients that come late, stay away for a step, or are laid out otherwise."""
    if nesterov and not momentum:
        return
    options = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.01}
    ends = []
    for kind in (torch.optim.SGD, FusedSGD):
        generator = Seed(3).generator()
        params = [torch.randn(shape, generator=generator).requires_grad_(True) for shape in ((4, 3), (5,), (2, 6))]
        optimizer = kind([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], **options)
        for step in range(4):
            for i, p in enumerate(params):
                grad = torch.randn(p.shape[::-1], generator=generator).permute(*range(p.dim())[::-1])
                p.grad = None if step == i else grad
            optimizer.step()
        ends.append(params)
    for plain, fused in zip(*ends, strict=True):
        assert torch.allclose(plain, fused, rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
def test_sgd_on_a_gpu_is_fused() -> None:
    plain, fused = (torch.ones(3, 2, device=device, requires_grad=True) for device in ("cpu", "cuda"))
    for p in (plain, fused):
        p.grad = torch.full_like(p, 2.0)
        optimizer = OPTIMIZERS.make("sgd", params=[p], lr=0.1, momentum=0.9, weight_decay=0.1)
        assert isinstance(optimizer, FusedSGD) == p.is_cuda
        for _ in range(3):
            optimizer.step()
    assert torch.allclose(plain, fused.cpu(), rtol=1e-6)


def test_the_fused_step_goes_on_from_a_state_without_some_momenta() -> None:
    """As plain SGD leaves it for parameters that had no gradient yet."""
    first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
    first.grad = torch.ones(3)
    plain = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)
    plain.step()
    fused = FusedSGD([first, second], lr=0.1, momentum=0.9)
    fused.load_state_dict({"state": plain.state_dict()["state"], "param_groups": fused.state_dict()["param_groups"]})
    second.grad = torch.ones(3)
    fused.step()
    assert torch.allclose(first, torch.full((3,), 1 - 0.1 - 0.1 * 1.9))
    assert torch.allclose(second, torch.full((3,), 0.9))


def test_the_fused_step_takes_momenta_in_another_layout() -> None:
    """As a file, which only keeps values, gives them back; all three are read at once."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model(torch.ones(1, 3, 4, 4)).square().sum().backward()
    fused = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    fused.step()
    before, grad = fused.state[model.weight]["momentum_buffer"].clone(), model.weight.grad
    fused.state[model.weight]["momentum_buffer"] = before.contiguous()
    model.weight.grad = grad.contiguous()
    assert before.contiguous().stride() != model.weight.stride()
    fused.step()
    after = fused.state[model.weight]["momentum_buffer"]
    assert after.stride() == model.weight.stride()
    torch.testing.assert_close(after, 0.9 * before + grad)
