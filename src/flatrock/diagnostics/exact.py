"""Trace, Frobenius norm and diagonal of the Hessian of a small network, exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatrock.diagnostics.hessian import by_layer, unheeded
from flatrock.diagnostics.moments import Moments, known_moments


@dataclass(frozen=True)
class Exact:
    """Moments of the whole Hessian and of each layer's diagonal block, and d^2 L / dw_i^2 of every parameter."""

    whole: Moments
    layers: dict[str, Moments]
    diagonal: Tensor


def exact_curvature(
    total: Tensor, parameters: Mapping[str, Tensor], *, chunk: int = 16, seen: Callable[[int], None] = unheeded
) -> Exact:
    """Of the Hessian of `total`, whose graph must reach the parameters.

    Makes one product per parameter, `chunk` at a time, and stores no row: for networks of some 10,000 parameters.
    Written here and not left to curvlinops because it keeps one graph for all products and asks for each pair of
    tensors only once. `seen(k)` is called after every k rows.
    """
    # H is symmetric: blocks with smaller tensors are known already, so the largest tensor needs only its own.
    names = sorted(parameters, key=lambda name: parameters[name].numel())
    slopes = torch.autograd.grad(total, [parameters[n] for n in names], create_graph=True, materialize_grads=True)
    diagonal = {name: torch.zeros(p.numel(), dtype=torch.float64, device=p.device) for name, p in parameters.items()}
    squares: dict[tuple[str, str], float] = {}
    for i, (name, slope) in enumerate(zip(names, slopes, strict=True)):
        for start in range(0, slope.numel(), chunk):
            stop = min(start + chunk, slope.numel())
            rows = _rows(slope, start, stop, [parameters[n] for n in names[i:]])
            diagonal[name][start:stop] = rows[0][:, start:stop].diagonal().double()
            for other, block in zip(names[i:], rows, strict=True):
                squares[name, other] = squares.get((name, other), 0.0) + float(block.double().square().sum())
            seen(stop - start)
    layers = {layer: _moments(list(members), diagonal, squares) for layer, members in by_layer(parameters).items()}
    return Exact(_moments(names, diagonal, squares), layers, torch.cat(list(diagonal.values())))


def _rows(slope: Tensor, start: int, stop: int, others: Sequence[Tensor]) -> list[Tensor]:
    """Rows start..stop of the Hessian blocks (tensor of `slope`) x (each of the others), flattened to matrices."""
    count = stop - start
    if not slope.requires_grad:
        return [slope.new_zeros(count, p.numel()) for p in others]
    basis = slope.new_zeros(count, slope.numel())
    basis[torch.arange(count), torch.arange(start, stop)] = 1
    rows = torch.autograd.grad(
        slope,
        others,
        grad_outputs=basis.reshape(count, *slope.shape),
        retain_graph=True,
        materialize_grads=True,
        is_grads_batched=True,
    )
    return [row.reshape(-1, p.numel()).expand(count, -1) for row, p in zip(rows, others, strict=True)]


def _moments(
    members: Sequence[str], diagonal: Mapping[str, Tensor], squares: Mapping[tuple[str, str], float]
) -> Moments:
    """Of the diagonal block that belongs to these parameters."""
    inside = [(a == b, v) for (a, b), v in squares.items() if a in members and b in members]
    trace = sum(float(diagonal[n].sum()) for n in members)
    return known_moments(
        sum(diagonal[n].numel() for n in members), trace, sum(v if same else 2 * v for same, v in inside)
    )
