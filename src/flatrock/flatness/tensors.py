"""Which parameters a method moves, and Gaussian noise for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flatrock.core.borrow import mode
from flatrock.core.errors import ModelError
from flatrock.core.hooks import Shift
from flatrock.core.options import choose
from flatrock.core.rng import Seed

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Modules whose weights are meant; None asks for parameters by name or shape, whatever module holds them.
TENSORS: dict[str, tuple[type[nn.Module], ...] | None] = {
    "weights": (*CONVOLUTIONS, nn.Linear, nn.MultiheadAttention),
    "conv": CONVOLUTIONS,
    "conv_named": None,
    "matrices": None,
    "all": None,
}
# What the weights of attention are called; one matrix, or three where keys and values have widths of their own.
ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def chosen(model: nn.Module, which: str) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, each once even if layers share it.

    `weights`: the weights of convolutions, linear layers and attention; `conv`: of convolutions only; `conv_named`:
    every parameter with conv in its name, the rule of RAT's code; `matrices`: every parameter with more than one
    dimension; `all`: every parameter. Of a weight that is computed from other parameters (weight_norm, spectral_norm),
    those of its shape; ModelError if none is.
    """
    choose("flatness", "tensors", which, TENSORS)
    owners = TENSORS[which]
    # By identity, not by name: the name of a shared parameter is that of the first module that holds it.
    layers = [(n, m) for n, m in model.named_modules() if owners is not None and isinstance(m, owners)]
    owned = {id(p) for name, layer in layers for p in _weights(name, layer, which)}
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and _meant(which, name, p, owned)}
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no trainable parameter that {which!r} stands for; "
            f"choose another of {', '.join(TENSORS)}, or let its parameters require gradients"
        )
    return found


def _meant(which: str, name: str, parameter: Tensor, owned: set[int]) -> bool:
    """Whether a parameter is chosen; `owned` holds the identities of those of the modules that are meant."""
    match which:
        case "all":
            return True
        case "matrices":
            return parameter.dim() > 1
        case "conv_named":
            return "conv" in name
    return id(parameter) in owned


def _weights(layer: str, module: nn.Module, which: str) -> Iterator[Tensor]:
    """Parameters that are the weights of this layer, or that its weights are computed from."""
    for name in ATTENTION if isinstance(module, nn.MultiheadAttention) else ("weight",):
        own = module._parameters.get(name)  # asked for at every step: named_parameters takes twice the time
        if own is not None:
            yield own
        else:
            yield from _origins(layer, module, name, which)


def _origins(layer: str, module: nn.Module, name: str, which: str) -> list[Tensor]:
    """Parameters of the shape of this computed tensor among those it is computed from.

    They are what it is proportional to: the direction v of weight_norm, not its lengths g; the matrix spectral_norm
    divides by its norm; what pruning masks.
    """
    if parametrize.is_parametrized(module, name):
        made_of = list(module.parametrizations[name].parameters())  # type: ignore[index, union-attr]
    else:  # the older way: weight_g, weight_v, weight_orig beside a tensor that a hook computes
        made_of = [p for n, p in module.named_parameters(recurse=False) if n.startswith(f"{name}_")]
    made_of = [p for p in made_of if p.requires_grad]
    if not made_of:
        return []
    with mode(module, training=False), torch.no_grad():  # in train mode asking spectral_norm moves its buffers
        shape = getattr(module, name).shape
    found = [p for p in made_of if p.shape == shape]
    if not found:
        raise ModelError(
            f"layer {layer!r} computes its {name} of shape {tuple(shape)} from parameters of other shapes "
            f"({', '.join(str(tuple(p.shape)) for p in made_of)}), so that {which!r} stands for none of them; choose "
            "'matrices' or 'all', or make it a parameter with torch.nn.utils.parametrize.remove_parametrizations"
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
