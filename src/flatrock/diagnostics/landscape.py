"""The loss along directions in weight space: filter-normalised directions, and a walk that gives the weights back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flatrock.core.borrow import nudged
from flatrock.core.hooks import Shift
from flatrock.core.rng import Seed
from flatrock.core.threat import rows

# Smallest norm a filter of the direction is divided by.
TINY = 1e-10


def filter_direction(model: nn.Module, seed: Seed) -> Shift:
    """d ~ N(0, I), each filter scaled to the norm of the weights': d_j <- d_j ||w_j|| / ||d_j|| (Li et al. 2018).

    A filter is what one output of a layer sees: a row of a linear weight, an output channel of a convolution. Biases
    and normalisation layers (tensors of one dimension) stay where they are. The random numbers belong to seed and
    name, not to the weights, so that rescaling a ReLU network rescales its direction and leaves the curve as it is.
    """
    return {name: _scaled(p.detach(), seed.child(name)) for name, p in model.named_parameters() if p.dim() > 1}


def _scaled(weight: Tensor, seed: Seed) -> Tensor:
    noise = torch.randn(weight.shape, generator=seed.generator(weight.device), dtype=weight.dtype, device=weight.device)
    factor: Tensor = _lengths(weight) / (_lengths(noise) + TINY)
    return noise * rows(factor, weight)


def _lengths(tensor: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(tensor.flatten(1), dim=1)
    return length


def along(
    model: nn.Module, direction: Shift, alphas: Sequence[float], measure: Callable[[nn.Module], float]
) -> list[float]:
    """What `measure` says of the network with weights w + alpha * d, for every alpha; the weights come back exactly.

    An adversarial loss must be measured with inputs attacked at each point; with those of w it is too low elsewhere.
    """
    found = []
    for alpha in alphas:
        with nudged(model, {name: alpha * d for name, d in direction.items()}):
            found.append(measure(model))
    return found
