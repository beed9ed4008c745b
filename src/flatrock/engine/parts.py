"""A batch that goes through the network in parts, so that it needs the memory of one of them: same loss, same step.

An attack treats every sample for itself, so parts of a batch are attacked one after the other. A loss may look at the
whole batch (RAT, S2O, means over labelled samples only), so it is computed of all features and logits at once: parts
are run without gradient for these, and once more, one by one, on the way back. That is one forward pass more for each
pass of a loss, and gradients that no loss has to be taken apart for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _NormBase

from flatrock.core.borrow import copies, kept_buffers, put
from flatrock.core.rng import kept_global_rng, layer_states, put_layer_states


def part_sizes(rows: int, most: int | None) -> list[int]:
    """Sizes of the parts of so many rows: nearly one size, at most `most`, but two at least (BatchNorm needs two)."""
    if most is None or rows <= most:
        return [rows]
    count = max(min(-(-rows // most), rows // 2), 1)
    return [rows // count + (i < rows % count) for i in range(count)]


def running_statistics(model: nn.Module) -> list[Tensor]:
    """What BatchNorm, and InstanceNorm if it does, has gathered."""
    norms = (m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats)
    return [s for m in norms for s in (m.running_mean, m.running_var) if s is not None]


def in_turn(model: nn.Module, *tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """One part after the other of tensors that come in parts; whoever asks for the next one has run this one.

    Each finds the buffers of the network as the first one did. In the end BatchNorm has gathered the mean over them,
    by their rows, and counted one batch: as if each had been on a device of its own.
    """
    parts = list(zip(*tensors, strict=True))
    if len(parts) == 1:
        yield parts[0]
        return
    buffers, gathered = list(model.buffers()), running_statistics(model)
    before, begun, ended = copies(buffers), copies(gathered), copies(gathered)
    rows = sum(len(part[0]) for part in parts)
    for i, part in enumerate(parts):
        if i > 0:
            put(buffers, before)
        yield part
        if gathered:  # changes, not values: nothing is rounded where nothing changes, as in eval mode
            torch._foreach_add_(ended, torch._foreach_sub(gathered, begun), alpha=len(part[0]) / rows)
    put(gathered, ended)


@dataclass(frozen=True)
class _Way:
    """How parts are run: `run` gives tensors with a row for each row of its `count` inputs."""

    model: nn.Module
    run: Callable[..., Sequence[Tensor]]
    sizes: list[int]
    count: int
    trained: list[nn.Parameter]


class _InParts(torch.autograd.Function):
    """Whatever `run` gives for the whole inputs, of its parts; gradients reach parameters only."""

    @staticmethod
    def forward(ctx: Any, way: _Way, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[: way.count]
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)  # of what no loss looks at there is none
        ctx.way, ctx.before, ctx.states = way, copies(list(way.model.buffers())), []
        found = []
        for part in in_turn(way.model, *(torch.split(x, way.sizes) for x in inputs)):
            ctx.states.append(layer_states(part[0].device))
            found.append(way.run(*part))
        return tuple(torch.cat(column) for column in zip(*found, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The same passes again: from the same buffers, with the same random numbers in layers that draw."""
        way: _Way = ctx.way
        inputs = [torch.split(x, way.sizes) for x in ctx.saved_tensors]
        asked = [(i, torch.split(grad, way.sizes)) for i, grad in enumerate(grads) if grad is not None]
        # Sums of their own: what a compiled pass returns is overwritten by the next one.
        sums, met = [torch.zeros_like(p) for p in way.trained], [False] * len(way.trained)
        device = inputs[0][0].device
        with kept_buffers(way.model), kept_global_rng(device), torch.enable_grad():
            put(list(way.model.buffers()), ctx.before)
            for k, part in enumerate(in_turn(way.model, *inputs)):
                put_layer_states(device, ctx.states[k])
                found = way.run(*part)
                outputs, incoming = [found[i] for i, _ in asked], [grad[k] for _, grad in asked]
                made = torch.autograd.grad(outputs, way.trained, incoming, allow_unused=True)
                there = [(s, g) for s, g in zip(sums, made, strict=True) if g is not None]
                torch._foreach_add_([s for s, _ in there], [g for _, g in there])
                met = [was or g is not None for was, g in zip(met, made, strict=True)]
        of_trained = (s if there else None for s, there in zip(sums, met, strict=True))
        return (None, *(None for _ in inputs), *of_trained)


def in_parts(
    model: nn.Module, run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], sizes: list[int]
) -> list[Tensor]:
    """What `run`, passes of the model, gives for parts of the inputs, put together; it has gradients of parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    way = _Way(model, run, sizes, len(inputs), trained)
    return list(_InParts.apply(way, *inputs, *trained))  # type: ignore[no-untyped-call]
