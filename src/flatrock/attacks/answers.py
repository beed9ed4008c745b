"""What a model says to inputs that are not the clean ones, on which it was checked."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flatrock.core.device import memory_is_short
from flatrock.core.errors import FlatrockError, ModelError, in_words


def answer(model: Callable[[Tensor], Tensor], x: Tensor, classes: int | None) -> Tensor:
    """Its logits; ModelError if it fails, or gives anything but a row of so many logits each (None: not known)."""
    try:
        logits = model(x)
    except Exception as error:  # it is the user's code: anything can happen
        if isinstance(error, FlatrockError) or memory_is_short(error):
            raise
        raise ModelError(
            f"the model answers the clean inputs, but fails on others of shape {tuple(x.shape)} on {x.device}: "
            f"{in_words(error)}; let it answer every input in [0, 1], in batches of any size"
        ) from error
    if classes is not None and logits.shape != (len(x), classes):
        raise ModelError(
            f"the model has {classes} classes on the clean inputs, but on {len(x)} others it gives logits of shape "
            f"{tuple(logits.shape)}; let it return the same classes for every input in [0, 1]"
        )
    return logits
