"""Directions in weight space: filter-normalised, what they move, and sums of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.errors import ModelError
from flatrock.core.files import json_text, sha256
from flatrock.core.hooks import Shift
from flatrock.core.rng import Seed
from flatrock.core.threat import rows

# Smallest norm a filter of the direction is divided by.
TINY = 1e-10


def movable(model: nn.Module) -> tuple[str, ...]:
    """The names of what directions move: weights of two or more dimensions that are not frozen; ModelError if none."""
    names = tuple(name for name, p in model.named_parameters() if _moves(p))
    if not names:
        raise ModelError(
            f"{type(model).__name__} has no weights of two or more dimensions that are not frozen, so no filters to "
            "move; model.requires_grad_(True) thaws them"
        )
    return names


def _moves(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 1 and parameter.requires_grad


def filter_direction(model: nn.Module, seed: Seed, names: Sequence[str] | None = None) -> Shift:
    """d ~ N(0, I), each filter scaled to the norm of the weights': d_j <- d_j ||w_j|| / ||d_j|| (Li et al. 2018).

    A filter is what one output of a layer sees: a row of a linear weight, an output channel of a convolution. Biases
    and normalisation layers (tensors of one dimension) stay where they are, and so does what is frozen: a mean that a
    wrapper keeps as a parameter is no weight. The random numbers belong to seed and name, not to the weights or their
    device, so that rescaling a ReLU network rescales its direction and leaves the curve as it is. A tensor that several
    layers share has one direction, that of the first name it is found under. `names` are those to move, asked for
    (`movable`) before somebody froze the network.
    """
    weights = dict(model.named_parameters())
    wanted = movable(model) if names is None else names
    return {name: _scaled(weights[name].detach(), seed.child(name)) for name in wanted}


def _scaled(weight: Tensor, seed: Seed) -> Tensor:
    # Drawn on the CPU in one type: the same direction on every device.
    noise = torch.randn(weight.shape, generator=seed.generator()).to(weight)
    factor: Tensor = _lengths(weight) / (_lengths(noise) + TINY)
    return noise * rows(factor, weight)


def _lengths(tensor: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(tensor.flatten(1), dim=1)
    return length


def moved(model: nn.Module) -> dict[str, Any]:
    """What a direction moves: how many tensors and weights, of how many; `tied` lists names of one and the same tensor.

    Tied tensors move once, and every layer that uses them sees the move. `digest` is that of the names and shapes of
    what moves: directions of one seed are the same random numbers for networks of one digest, and for no others.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    wide = {name: p for name, p in model.named_parameters() if _moves(p)}
    return {
        "tensors": len(wide),
        "weights": sum(p.numel() for p in wide.values()),
        "all_weights": sum(p.numel() for p in model.parameters()),
        "digest": sha256(json_text({name: list(p.shape) for name, p in sorted(wide.items())}))[:16],
        "tied": [group for group in names.values() if len(group) > 1],
    }


def combined(directions: Sequence[Shift], amounts: Sequence[float]) -> Shift:
    """sum_k amounts[k] * directions[k]; the directions move the same tensors."""
    first, *others = zip(directions, amounts, strict=True)
    shift = {name: first[1] * d for name, d in first[0].items()}
    for direction, amount in others:
        shift = {name: s + amount * direction[name] for name, s in shift.items()}
    return shift
