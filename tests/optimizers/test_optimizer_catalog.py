"""The optimizers by name: their options, torch's own SGD untouched, parameter groups, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.optimizers.catalog import OPTIMIZERS, own_options
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
    assert getattr(made, "inner_loops", False) == (name == "entropy_sgd")


def test_the_rows_are_these() -> None:
    assert OPTIMIZERS.names() == ["sgd", "entropy_sgd", "sgld"]
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


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sdg", {}, "unknown optimizer 'sdg'; known: entropy_sgd, sgd, sgld; did you mean 'sgd'"),
        ("sgd", {"momentun": 0.9}, "option of optimizer 'sgd': 'momentun'.*did you mean 'momentum'"),
        ("sgd", {"dampening": 0.1}, "option of optimizer 'sgd': 'dampening'"),
        ("sgd", {"lr": float("nan")}, "sgd lr must be a number >= 0, got nan"),
        ("sgd", {"momentum": 1.2}, "sgd momentum must be below 1, got 1.2"),
        ("sgd", {"weight_decay": -5e-4}, "sgd weight_decay must be a number >= 0, got -0.0005"),
        ("sgd", {"nesterov": True}, "sgd nesterov true needs momentum above 0, got 0.0"),
        ("sgld", {"momentum": 0.9}, "option of optimizer 'sgld': 'momentum'"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OPTIMIZERS.make(name, **{"params": leaves(), "lr": 0.1, "seed": Seed(0), **options})
