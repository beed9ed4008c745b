"""A trained network as plain weights, for use without flatrock."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.files import write_atomic
from flatrock.core.progress import Progress
from flatrock.core.tensorfile import is_checkpoint
from flatrock.models.adapted import Adapted
from flatrock.models.classifier import Classifier
from flatrock.recipes.restore import Source, open_checkpoint, restored, tell_doubted
from flatrock.recipes.schema import Recipe

SUFFIXES = (".pt", ".pth", ".safetensors")


@dataclass(frozen=True)
class Exported:
    """A file of weights: of which checkpoint, how many tensors, Python that loads them, and what to know of inputs."""

    file: Path
    checkpoint: Path
    tensors: int
    how: str
    inputs: str
    marks: tuple[str, ...]


def export_weights(
    source: Source, out: Path, *, which: str = "auto", overwrite: bool = False, progress: Progress | None = None
) -> Exported:
    """Write a plain state_dict of a run's network (its best epoch; see open_checkpoint) to a .pt or .safetensors file.

    Names are those of `flatrock.create_model(...)`; of a network of the user's, those of that network.
    """
    check_target(out, overwrite=overwrite)
    path, tensors, meta = open_checkpoint(source, which)
    tell_doubted(source, which, path, progress)
    model, recipe = restored(path, tensors, meta, progress)
    weights = plain_weights(model)
    write_atomic(out, _content(out, weights))
    return Exported(out, path, len(weights), _how(out, recipe, model), _inputs(model), model.marks)


def check_target(out: Path, *, overwrite: bool) -> None:
    """ConfigError or StateError if the weights cannot or must not go there."""
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"out: {out} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if out.exists() and is_checkpoint(out):
        raise StateError(f"{out} is a checkpoint of a run, and is left alone; choose another --out")
    if out.exists() and not overwrite:
        raise StateError(f"{out} exists; choose another --out, or replace it with --overwrite")


def plain_weights(model: Classifier) -> dict[str, Tensor]:
    """The state_dict on the CPU, each tensor with memory of its own."""
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in model.state_dict().items()}
    return _unadapted(model, own) if isinstance(model, Adapted) else own


def _unadapted(model: Adapted, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of the user's network: its last layer was taken out of it, normalisation put before it."""
    inner = {k.removeprefix("network."): v for k, v in weights.items() if k.startswith("network.")}
    head = {k.removeprefix("head."): v for k, v in weights.items() if k.startswith("head.")}
    places = [f"{place}." if place else "" for place in model.head_places]
    return inner | {f"{place}{name}": tensor.clone() for place in places for name, tensor in head.items()}


def _content(out: Path, weights: Mapping[str, Tensor]) -> bytes:
    if out.suffix == ".safetensors":
        from safetensors.torch import save

        return bytes(save(dict(weights), metadata={"format": "pt"}))  # as other projects mark theirs
    buffer = io.BytesIO()
    torch.save(dict(weights), buffer)
    return buffer.getvalue()


def _how(out: Path, recipe: Recipe, model: Classifier) -> str:
    """Python that makes the network and loads the file."""
    network = recipe.model
    if isinstance(model, Adapted):
        module, _, factory = network.name.partition(":")
        made = f"model = {module}.{factory}(...)"
    else:
        options: dict[str, Any] = {"num_classes": model.num_classes, "normalize": network.normalize, **network.options}
        given = ", ".join(f"{key}={value!r}" for key, value in options.items() if value is not None)
        made = f'model = flatrock.create_model("{network.name}", {given})'
    loads = f"torch.load({str(out)!r}, weights_only=True)"
    if out.suffix == ".safetensors":
        loads = f"safetensors.torch.load_file({str(out)!r})"
    return f"{made}; model.load_state_dict({loads}); model.eval()"


def _inputs(model: Classifier) -> str:
    """Range and shape of inputs, and who normalises them."""
    shape = ", ".join(map(str, model.input_shape))
    told = f"inputs [n, {shape}] in [0, 1]"
    if model.mean is None or model.std is None:
        return f"{told}, not normalised"
    if not isinstance(model, Adapted):
        return (
            f"{told}, normalised inside, (x - mean) / std, by the tensors `mean` and `std` of the file; a network of "
            "other code without these has to do that itself"
        )
    values = [[round(v, 6) for v in part.flatten().tolist()] for part in (model.mean, model.std)]
    return f"{told}, to be normalised before your network: (x - mean) / std with mean {values[0]}, std {values[1]}"
