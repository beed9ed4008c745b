"""Weights of a trained network as the beginning of one's own: other classes, other names, other sizes of images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flatrock.core.errors import ConfigError
from flatrock.models.adapted import Adapted
from flatrock.models.classifier import Classifier
from flatrock.models.foreign import converted
from flatrock.models.vit import RESIZES, Transformer
from flatrock.models.weights import Weights, fit, shapes_of
from flatrock.models.wrapping import Reading, closest, readings

KERNEL, POSITIONS = "patch_embed.proj.weight", "pos_embed"
HEAD = "head."
# Of the model itself, whatever the weights come with.
_NORMALIZATION = ("mean", "std")
# Layers that end a network of other classes: the head, and what the first transformers had before it while they were
# trained on ImageNet-21k.
_LEFT_OUT = r"(head|pre_logits)\."


@dataclass(frozen=True)
class Fitted:
    """Tensors for a network, under its names; `drawn` says why its head is not among them, '' if it is."""

    tensors: dict[str, Tensor]
    drawn: str = ""


def load_pretrained(model: Classifier, state: Mapping[str, Tensor]) -> Fitted:
    """Fill a network with the weights of one that may have other classes or, of transformers, other patches and images.

    See `fitted`. Nothing is changed where they do not fit.
    """
    found = fitted(model, state)
    model.load_state_dict(found.tensors, strict=False)  # normalisation is not among them
    return found


def fitted(model: Classifier, state: Mapping[str, Tensor]) -> Fitted:
    """What a network takes of weights under its own names; ConfigError lists what does not fit.

    A head of another number of classes, or none (of a transformer), is left out. Normalisation is the model's own.

    For a transformer the kernel that reads patches and the grid of position embeddings are resized by cubic
    interpolation (the kernel as the option `resize` says), 16x16 to 4x4 pixels and 14x14 to 15x15 places for a ViT-B16
    on CIFAR; the embedding of the class token is kept. As many places as the model has are taken as they are; a grid
    that has to be resized must be a square one. A kernel's numbers are not made larger where there are fewer of them.
    """
    expected = shapes_of(_own(model))
    found = {k: v for k, v in closest(readings(state), expected).state.items() if k not in _NORMALIZATION}
    if isinstance(model, Transformer):
        found = _for_images(model, found)
    drawn = _why_drawn(model, found)
    if drawn:
        expected = {k: s for k, s in expected.items() if not k.startswith(HEAD)}
    return Fitted(fit(found, expected, what=_called(model), unused=_LEFT_OUT if drawn else ""), drawn)


def of_file(model: Classifier, name: str, file: Weights) -> Reading:
    """The weights of a file under the names of the network called `name`; the normalisation they come with, if any."""
    if isinstance(model, Adapted):
        return closest(_either_names(model, file.state), _own(model))
    if isinstance(model, Transformer):  # of which there are weights without head
        return closest(readings(file.state), _own(model))
    found = converted(name, file)
    return Reading({k: v for k, v in found.state.items() if k not in _NORMALIZATION}, found.normalize)


def _either_names(model: Adapted, state: Mapping[str, Tensor]) -> Iterator[Reading]:
    """A network of the user's has the names its function gave it, or those it has here, where its head is taken out."""
    first, *others = (f"{place}." if place else "" for place in model.head_places)
    for reading in readings(state):
        yield reading
        renamed = {
            f"{HEAD}{k.removeprefix(first)}" if k.startswith(first) else f"network.{k}": v
            for k, v in reading.state.items()
            if not k.startswith(tuple(others))
        }
        yield Reading(renamed, reading.normalize)


def _own(model: Classifier) -> dict[str, Tensor]:
    """Weights and buffers but for normalisation; extra state may be no tensor."""
    return {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor) and k not in _NORMALIZATION}


def _called(model: Classifier) -> str:
    return f"this {type(model.network if isinstance(model, Adapted) else model).__name__}"


def _why_drawn(model: Classifier, state: Mapping[str, Tensor]) -> str:
    """Why the head cannot be taken, in words; '' if it can be, or ought to be."""
    classes, width = model.head.weight.shape
    weight = state.get(f"{HEAD}weight")
    if weight is not None and weight.dim() == 2 and len(weight) != classes and weight.shape[1] == width:
        return f"{len(weight)} classes there, {classes} here"
    if not isinstance(model, Transformer):
        return ""
    if not any(k.startswith(HEAD) for k in state):
        return "the weights come without one"
    return "another layer comes before it there" if any(k.startswith("pre_logits.") for k in state) else ""


def _for_images(model: Transformer, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with patches and positions of the sizes the model has."""
    found = dict(state)
    if KERNEL in found and found[KERNEL].dim() == 4:
        found[KERNEL] = _resized(found[KERNEL], tuple(model.get_parameter(KERNEL).shape[2:]), by=model.resize)
    if POSITIONS in found and found[POSITIONS].dim() == 3 and found[POSITIONS].shape != model.pos_embed.shape:
        found[POSITIONS] = _repositioned(found[POSITIONS], model.grid)
    return found


def _resized(images: Tensor, size: tuple[int, ...], *, by: str = "cubic") -> Tensor:
    """The last two axes interpolated: cubic (Keys, a = -1/2) and bilinear, where they shrink over as many more pixels,
    or the nearest one."""
    if images.shape[2:] == size:
        return images
    smooth = {} if by == "nearest" else {"antialias": True}
    return F.interpolate(images.double(), size=size, mode=RESIZES[by], **smooth).to(images.dtype)


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
