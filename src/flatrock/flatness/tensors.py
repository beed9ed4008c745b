"""Which parameters a method moves, and Gaussian noise for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatrock.core.errors import ModelError
from flatrock.core.hooks import Shift
from flatrock.core.options import choose
from flatrock.core.rng import Seed

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Modules whose `.weight` is meant; None asks for parameters by their shape, whatever module holds them.
TENSORS: dict[str, tuple[type[nn.Module], ...] | None] = {
    "weights": (*CONVOLUTIONS, nn.Linear),
    "conv": CONVOLUTIONS,
    "matrices": None,
    "all": None,
}


def chosen(model: nn.Module, which: str) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, each once even if layers share it.

    `weights`: the `.weight` of convolutions and linear layers; `conv`: of convolutions only; `matrices`: every
    parameter with more than one dimension; `all`: every parameter.
    """
    choose("flatness", "tensors", which, TENSORS)
    owners = TENSORS[which]
    # By identity, not by name: the name of a shared parameter is that of the first module that holds it.
    owned = set() if owners is None else {id(m.weight) for m in model.modules() if isinstance(m, owners)}
    found = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and (which == "all" or (p.dim() > 1 if owners is None else id(p) in owned))
    }
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no trainable parameter that {which!r} stands for; "
            f"choose another of {', '.join(TENSORS)}, or let its parameters require gradients"
        )
    return found


def noise(model: nn.Module, which: str, sigma: float, seed: Seed) -> Shift:
    """sigma * N(0, 1) for every chosen parameter; sigma = 0 moves nothing.

    Drawn by the device's own generator: millions of numbers at every step must cost next to nothing.
    """
    if sigma == 0:
        return {}
    tensors = chosen(model, which)
    generators: dict[torch.device, torch.Generator] = {}
    return {name: _normal(p, sigma, seed.child(name), generators) for name, p in tensors.items()}


def _normal(like: Tensor, sigma: float, seed: Seed, generators: dict[torch.device, torch.Generator]) -> Tensor:
    """In the memory layout of the parameter; one generator per device, started anew: making one takes its time."""
    if like.device not in generators:
        generators[like.device] = torch.Generator(like.device)
    generator = seed.restart(generators[like.device])
    return torch.empty_like(like, requires_grad=False).normal_(std=sigma, generator=generator)
