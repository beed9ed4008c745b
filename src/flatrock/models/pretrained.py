"""Weights of a transformer for other images as the beginning of one's own: patches and positions are resized."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from flatrock.core.errors import ConfigError
from flatrock.models.vit import Transformer
from flatrock.models.weights import fit, shapes_of, unwrapped

KERNEL, POSITIONS = "patch_embed.proj.weight", "pos_embed"
# Layers that end a network of other classes: the head, and what the first networks had before it while they were
# trained on ImageNet-21k.
_LEFT_OUT = r"(head|pre_logits)\."


def load_pretrained(model: Transformer, state: Mapping[str, Tensor]) -> None:
    """Fill a transformer with the weights of one that has other patches, images or classes; the head stays as it is.

    The kernel that reads patches and the grid of position embeddings are resized by cubic interpolation, 16x16 to 4x4
    pixels and 14x14 to 15x15 places for a ViT-B16 on CIFAR; the embedding of the class token is kept. As many places as
    the model has are taken as they are; a grid that has to be resized must be a square one. A kernel's numbers are not
    made larger where there are fewer of them. Normalisation is the model's own, whatever the weights
    come with. ConfigError lists what does not fit.
    """
    found = dict(unwrapped(state).state)
    own = model.state_dict()
    expected = {k: s for k, s in shapes_of(own).items() if not k.startswith("head.") and k not in ("mean", "std")}
    if KERNEL in found and found[KERNEL].dim() == 4:
        found[KERNEL] = _resized(found[KERNEL], expected[KERNEL][2:])
    if POSITIONS in found and found[POSITIONS].dim() == 3 and found[POSITIONS].shape != model.pos_embed.shape:
        found[POSITIONS] = _repositioned(found[POSITIONS], model.grid)
    fitting = fit(found, expected, what=f"this {type(model).__name__}", unused=_LEFT_OUT)
    model.load_state_dict(own | fitting)


def _resized(images: Tensor, size: tuple[int, ...]) -> Tensor:
    """Cubic interpolation (Keys, a = -1/2) of the last two axes; where they shrink, over as many more pixels."""
    if images.shape[2:] == size:
        return images
    return F.interpolate(images.double(), size=size, mode="bicubic", antialias=True).to(images.dtype)


def _repositioned(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Embeddings [1, 1 + r * r, d] of the class token and a square of places, for another grid."""
    token, places = positions[:, :1], positions[:, 1:]
    side = math.isqrt(places.shape[1])
    if side * side != places.shape[1]:
        raise ConfigError(
            f"{POSITIONS} has {places.shape[1]} places beside the class token, which are no square; only weights of a "
            "network for square images can be resized"
        )
    square = places.transpose(1, 2).reshape(1, -1, side, side)
    return torch.cat([token, _resized(square, grid).flatten(2).transpose(1, 2)], 1)
