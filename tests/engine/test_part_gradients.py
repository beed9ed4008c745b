"""Passes in parts: gradients of the passes that were made, compiled ones too, and what is looked at beforehand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from flatrock.core.rng import Seed, kept_global_rng, random_states
from flatrock.engine.job import Job
from flatrock.engine.parts import in_parts
from flatrock.engine.runner import Engine, Runner
from flatrock.engine.step import train_step
from flatrock.models.catalog import create_model


class Drawing(nn.Module):
    """Dropout, a power iteration and a BatchNorm: what a pass draws, and what it leaves, decide the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Linear(4, 8))
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.norm(self.first(x))))
        return out


def test_gradients_are_those_of_the_passes_that_were_made() -> None:
    """The same coins and the same buffers on the way back; both are left as the passes forward leave them."""
    x = torch.randn(11, 4, dtype=torch.float64, generator=Seed(3).generator())
    sizes, model = [4, 4, 3], Drawing().double().train()
    copied = [copy.deepcopy(model) for _ in sizes]  # of each part a network of its own

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return (a.square().mean() + a.T @ b).sum()

    with kept_global_rng(seed=Seed(5)):
        a, b = in_parts(model, lambda *inputs: [model(x) for x in inputs], (x, 2 * x), sizes)
        left, state = {k: v.clone() for k, v in model.named_buffers()}, random_states()
        loss(a, b).backward()
        assert all(torch.equal(v, left[k]) for k, v in model.named_buffers())
        assert random_states() == state
    with kept_global_rng(seed=Seed(5)):
        rows = [(net(part), net(2 * part)) for net, part in zip(copied, x.split(sizes), strict=True)]
        assert random_states() == state
        true_a, true_b = (torch.cat(column) for column in zip(*rows, strict=True))
        loss(true_a, true_b).backward()
    assert torch.equal(a, true_a)
    assert torch.equal(b, true_b)
    for name, p in model.named_parameters():
        grads = [net.get_parameter(name).grad for net in copied]
        if name.startswith("idle"):
            assert p.grad is None
        else:
            assert p.grad is not None
            torch.testing.assert_close(p.grad, sum(g for g in grads if g is not None), rtol=1e-12, atol=1e-14)


def test_a_pass_that_nobody_looks_at_costs_no_gradient() -> None:
    """And one whose features alone are looked at has theirs."""
    model = nn.Linear(4, 3)
    a, b = in_parts(model, lambda x, y: [model(x), 2 * model(y)], (torch.ones(6, 4), torch.ones(6, 4)), [3, 3])
    (grad,) = torch.autograd.grad(b.sum(), model.weight)
    assert torch.equal(grad, torch.full((3, 4), 12.0))
    assert a.requires_grad
    with torch.no_grad():
        (c,) = in_parts(model, lambda x: [model(x)], (torch.ones(6, 4),), [3, 3])
    assert not c.requires_grad


def test_second_derivatives_are_refused() -> None:
    model = nn.Linear(4, 3)
    (a,) = in_parts(model, lambda x: [model(x)], (torch.ones(6, 4),), [3, 3])
    (grad,) = torch.autograd.grad(a.square().sum(), model.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# Engines


def test_passes_are_compiled_for_the_largest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def compiler(work: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda *inputs: seen.append(len(inputs[0])) or work(*inputs)

    monkeypatch.setattr(torch, "compile", compiler)
    model = create_model("digits_cnn", num_classes=10)
    runner = Runner(model, Engine(compile=True), size=16, most=6)
    runner.view(torch.rand(16, 1, 8, 8, generator=Seed(1).generator())).logits.sum().backward()
    assert seen == [6, 6], "of parts of 6, 5 and 5 rows: forward, and on the way back"
    assert runner.findings == {}
    assert Runner(model, size=128, most=64)._size == 64
    assert Runner(model, size=128)._size == 128


def test_the_twin_is_looked_at_part_by_part(make_job: Callable[..., Job], tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", train__micro_batch=6)
    seen: list[int] = []
    monitor = job.runner.check
    job.runner.check = lambda x, bn_mode: seen.append(len(x)) or monitor(x, bn_mode)  # type: ignore[method-assign]
    job.model.train()
    for guard in (True, False):
        train_step(job, next(iter(job.loader.epoch(0))), step=0, guard=guard)
    assert seen == [6, 5, 5]


@pytest.mark.slow
def test_compiled_parts_have_the_gradients_of_plain_ones() -> None:
    """By torch's own compiler."""
    x = torch.rand(24, 4, generator=Seed(1).generator())
    found = []
    for compiled in (False, True):
        with kept_global_rng(seed=Seed(5)):
            model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).train()
            runner = Runner(model, Engine(compile=compiled), size=24, most=8)
            clean, adv = runner.views(x, x + 0.1)
            (clean.logits - adv.logits).square().mean().backward()
            assert runner.findings == {}
            found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_compiled_dropout_draws_the_same_with_and_without_gradients() -> None:
    """Passes forward and those on the way back are compiled apart."""
    with kept_global_rng(seed=Seed(5)):
        layers = (nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 3))
        runner = Runner(nn.Sequential(*layers).train(), Engine(compile=True), size=24, most=8)
        made: dict[bool, list[Tensor]] = {True: [], False: []}
        run = runner.run

        def recorded(*inputs: Tensor) -> list[Tensor]:
            found = run(*inputs)
            made[torch.is_grad_enabled()].append(found[1].detach())
            return found

        runner.run = recorded  # type: ignore[method-assign]
        runner.view(torch.ones(24, 4)).logits.sum().backward()
    assert (len(made[True]), runner.findings) == (3, {})
    for one, other in zip(made[True], made[False], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not torch.equal(made[True][0], made[True][1]), "inputs are alike, coins are not"
