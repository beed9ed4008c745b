"""Trace, Frobenius norm and diagonal of the Hessian of a small network, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatrock.diagnostics.hessian import by_layer, unheeded
from flatrock.diagnostics.kept import Kept
from flatrock.diagnostics.moments import Moments, known_moments

# Rows that are kept together: a line on disk for every few would take longer than they do.
KEPT = 256


@dataclass(frozen=True)
class Exact:
    """Moments of the whole Hessian and of each layer's diagonal block, and d^2 L / dw_i^2 of every parameter."""

    whole: Moments
    layers: dict[str, Moments]
    diagonal: Tensor


def exact_curvature(
    total: Tensor,
    parameters: Mapping[str, Tensor],
    *,
    chunk: int = 16,
    seen: Callable[[int], None] = unheeded,
    kept: Kept | None = None,
) -> Exact:
    """Of the Hessian of `total`, whose graph must reach the parameters.

    Makes one product per parameter and stores no row: for networks of some 10,000 parameters. One graph serves all
    products, and each pair of tensors is asked for only once. `seen(k)` is called after every k rows, `chunk` at most.
    The parts of `exact_parts` are `kept`.
    """
    # H is symmetric: blocks with smaller tensors are known already, so the largest tensor needs only its own.
    names, keep = _order(parameters), kept or Kept()
    slopes = torch.autograd.grad(total, [parameters[n] for n in names], create_graph=True, materialize_grads=True)
    diagonal = {name: torch.zeros(p.numel(), dtype=torch.float64, device=p.device) for name, p in parameters.items()}
    squares: dict[tuple[str, str], float] = {}
    for name, start, stop in _parts(parameters):
        others = names[names.index(name) :]
        slope, tensors = slopes[names.index(name)], [parameters[n] for n in others]
        make = partial(_strip, slope, start, stop, tensors, chunk, seen)
        found = keep(_part_name(name, start), make, write=dict[str, Any], read=dict[str, Any])
        diagonal[name][start:stop] = torch.tensor(found["diagonal"], dtype=torch.float64)
        for sums in found["squares"]:
            for other, value in zip(others, sums, strict=True):
                squares[name, other] = squares.get((name, other), 0.0) + value
    layers = {layer: _moments(list(members), diagonal, squares) for layer, members in by_layer(parameters).items()}
    return Exact(_moments(names, diagonal, squares), layers, torch.cat(list(diagonal.values())))


def exact_parts(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of rows of each part that is kept, by name."""
    return {_part_name(name, start): stop - start for name, start, stop in _parts(parameters)}


def _part_name(name: str, start: int) -> str:
    return f"exact/{name}/{start}"


def _order(parameters: Mapping[str, Tensor]) -> list[str]:
    return sorted(parameters, key=lambda name: parameters[name].numel())


def _parts(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, int, int]]:
    """Strips of rows in the order they are made: a tensor's name, from and to."""
    for name in _order(parameters):
        size = parameters[name].numel()
        for start in range(0, size, KEPT):
            yield name, start, min(start + KEPT, size)


def _strip(
    slope: Tensor, start: int, stop: int, others: Sequence[Tensor], chunk: int, seen: Callable[[int], None]
) -> dict[str, Any]:
    """Of rows start..stop: the diagonal and, `chunk` rows at a time, the sum of squares beside each of the others."""
    diagonal: list[float] = []
    squares: list[list[float]] = []
    for first in range(start, stop, chunk):
        last = min(first + chunk, stop)
        rows = _rows(slope, first, last, others)
        diagonal += rows[0][:, first:last].diagonal().double().tolist()
        squares.append([float(block.double().square().sum()) for block in rows])
        seen(last - first)
    return {"diagonal": diagonal, "squares": squares}


def _rows(slope: Tensor, start: int, stop: int, others: Sequence[Tensor]) -> list[Tensor]:
    """Rows start..stop of the Hessian blocks (tensor of `slope`) x (each of the others), flattened to matrices."""
    count = stop - start
    if not slope.requires_grad:
        return [slope.new_zeros(count, p.numel()) for p in others]
    # One after the other: batched, torch's second derivative of GroupNorm fails, and on a CPU it is no faster.
    flat = slope.flatten()
    rows = [torch.autograd.grad(flat[i], others, retain_graph=True, materialize_grads=True) for i in range(start, stop)]
    return [torch.stack(blocks).reshape(count, -1) for blocks in zip(*rows, strict=True)]


def _moments(
    members: Sequence[str], diagonal: Mapping[str, Tensor], squares: Mapping[tuple[str, str], float]
) -> Moments:
    """Of the diagonal block that belongs to these parameters."""
    inside = [(a == b, v) for (a, b), v in squares.items() if a in members and b in members]
    trace = sum(float(diagonal[n].sum()) for n in members)
    return known_moments(
        sum(diagonal[n].numel() for n in members), trace, sum(v if same else 2 * v for same, v in inside)
    )
