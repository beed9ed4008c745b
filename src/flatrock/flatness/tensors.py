"""Which parameters a method moves, and Gaussian noise for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    """sigma * N(0, 1) for every chosen parameter; sigma = 0 moves nothing."""
    return {} if sigma == 0 else Noise(chosen(model, which), sigma, seed)


class Noise(Mapping[str, Tensor]):
    """Gaussian numbers by name of a parameter, drawn when asked for and the same each time.

    All of them together are as large as the network; who needs one after the other need not hold them all. Drawn by
    the device's own generator: millions of numbers at every step must cost next to nothing.
    """

    def __init__(self, like: Mapping[str, Tensor], sigma: float, seed: Seed) -> None:
        self._like, self._sigma, self._seed = like, sigma, seed
        self._generators: dict[torch.device, torch.Generator] = {}  # started anew: making one takes its time

    def __getitem__(self, name: str) -> Tensor:
        like = self._like[name]
        if like.device not in self._generators:
            self._generators[like.device] = torch.Generator(like.device)
        generator = self._seed.child(name).restart(self._generators[like.device])
        # Not in the layout of the parameter: that must not decide which entry gets which number.
        room = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return room.normal_(std=self._sigma, generator=generator)

    def __contains__(self, name: object) -> bool:  # a mapping's own would draw to find out
        return name in self._like

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)
