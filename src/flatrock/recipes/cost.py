"""What a recipe will cost, before it is paid: parameters, steps, network passes, arithmetic, a time from one probe."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from flatrock.core.borrow import frozen
from flatrock.data.catalog import info
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.recipes.build import build_model
from flatrock.recipes.schema import Recipe

PROBE_BATCH = 8
QUICK = 2.0  # seconds a probe on a real batch may take
BACKWARD = 2.0  # a backward pass through inputs and weights costs about twice the forward; inputs alone about once


@dataclass(frozen=True)
class Cost:
    """An estimate; `seconds` extrapolates one timed batch on this device: an order of magnitude."""

    parameters: int
    samples: int | None
    steps_per_epoch: int | None
    steps: int | None
    forwards_per_step: int
    total_flops: float | None
    seconds: float | None


def estimate(recipe: Recipe, *, device: torch.device) -> Cost:
    """Estimate the cost of a recipe; the data need not be there."""
    model = build_model(recipe).to(device)
    objective = OBJECTIVES.make(recipe.objective.name, **recipe.objective.options)
    attack_steps = 0 if recipe.attack.name == "none" else int(recipe.attack.options.get("steps", 20))
    passes = len(objective.passes)
    x = torch.rand(PROBE_BATCH, *model.input_shape, device=device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    forward = counter.get_total_flops() / PROBE_BATCH
    train_size: int | None = recipe.data.options.get("points", info(recipe.data.name).train_size)
    samples = None if train_size is None else min(train_size - recipe.data.held_out, recipe.data.limit or train_size)
    per_epoch = None if samples is None else -(-samples // recipe.train.batch_size)
    steps = None if per_epoch is None else min(per_epoch * recipe.train.epochs, recipe.train.max_steps or 10**12)
    forwards_per_image = attack_steps * (1 + BACKWARD / 2) + passes * (1 + BACKWARD)
    images = None if steps is None else steps * recipe.train.batch_size
    return Cost(
        parameters=sum(p.numel() for p in model.parameters()),
        samples=samples,
        steps_per_epoch=per_epoch,
        steps=steps,
        forwards_per_step=attack_steps + passes,
        total_flops=None if images is None else images * forwards_per_image * forward,
        seconds=None
        if images is None
        else images * _seconds_per_image(model, x, recipe.train.batch_size) * forwards_per_image / 2,
    )


def _seconds_per_image(model: torch.nn.Module, x: torch.Tensor, batch_size: int) -> float:
    """Best time per image of a forward and input-backward pass; on a real batch where that is quick."""
    model.eval()
    small = _best_time(model, x)
    if small * batch_size / len(x) > QUICK:
        return small / len(x)
    return _best_time(model, x.repeat_interleave(-(-batch_size // len(x)), 0)[:batch_size]) / batch_size


def _best_time(model: torch.nn.Module, x: torch.Tensor) -> float:
    times = []
    with frozen(model):
        for _ in range(4):
            begun = time.perf_counter()
            leaf = x.clone().requires_grad_(True)
            torch.autograd.grad(model(leaf).sum(), leaf)[0].sum().item()
            times.append(time.perf_counter() - begun)
    return min(times)
