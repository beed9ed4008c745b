"""Features and logits of any network in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.errors import ModelError
from flatrock.core.types import View
from flatrock.models.classifier import Classifier


def view(model: nn.Module, x: Tensor) -> View:
    """The input and the output of the model's last linear layer for the batch x.

    A `Classifier` says so itself. In any other module the last `nn.Linear` executed is watched during one forward
    pass; ModelError if none ran or if the model does not return exactly what that layer made.
    """
    return model.view(x) if isinstance(model, Classifier) else last_linear(model, x)[1]


def last_linear(model: nn.Module, x: Tensor) -> tuple[nn.Linear, View]:
    """The layer that makes the model's logits, and what it takes and gives; ModelError as in `view`."""
    calls: list[tuple[nn.Linear, Tensor, Tensor, int]] = []

    def keep(layer: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        calls.append((layer, args[0] if args else kwargs["input"], output, _version(output)))
        del calls[:-1]  # only the last one matters; holding the others would hold their memory

    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    handles = []
    try:
        for module in linears:
            handles.append(module.register_forward_hook(keep, with_kwargs=True))
        logits = model(x)
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        raise ModelError(_no_linear(model, linears=len(linears)))
    layer, features, made, version = calls[0]
    if _version(made) != version or not _same(logits, made):
        raise ModelError(
            f"{type(model).__name__} returns {_shape(logits)}, which is not the output {_shape(made)} of its last "
            f"nn.Linear{_alike(logits, made)}; features and logits need one row per input and a linear layer as the "
            "last step: return that layer's output unchanged (no softmax, scaling or pooling after it)"
        )
    return layer, View(features=features, logits=logits)


def _no_linear(model: nn.Module, *, linears: int) -> str:
    found = f"none of its {linears} nn.Linear layers ran as a module" if linears else "it has no nn.Linear layer"
    return (
        f"the features of {type(model).__name__} are the input of its last nn.Linear, but {found}; "
        "end the model with an nn.Linear, and pass it before torch.compile"
    )


def _version(tensor: Tensor) -> int:
    """torch's count of in-place changes; tensors made in inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def _same(output: object, made: Tensor) -> bool:
    """Whether the model returned the layer's output: itself, an alias, a copy, or a cast to another precision."""
    if output is made:
        return made.dim() == 2
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape != made.shape:
        return False
    return torch.equal(output.detach(), made.detach().to(device=output.device, dtype=output.dtype))


def _alike(output: object, made: Tensor) -> str:
    """A word where only the numbers are others."""
    return " (the values differ)" if isinstance(output, Tensor) and output.shape == made.shape else ""


def _shape(output: object) -> str:
    return str(list(output.shape)) if isinstance(output, Tensor) else f"a {type(output).__name__}"
