"""What a model says to inputs that are not the clean ones, on which it was checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from flatrock.core.device import memory_is_short
from flatrock.core.errors import FlatrockError, ModelError, in_words
from flatrock.core.guests import raised_at


def answer(model: Callable[[Tensor], Tensor], x: Tensor, classes: int | None) -> Tensor:
    """Its logits; ModelError if it fails, or gives anything but a row of so many logits each (None: not known)."""
    try:
        logits = model(x)
    except Exception as error:  # it is the user's code: anything can happen
        if isinstance(error, FlatrockError) or memory_is_short(error):
            raise
        raise ModelError(
            f"the model answers the clean inputs, but fails on others of shape {tuple(x.shape)}, {x.dtype} on "
            f"{x.device}: {in_words(error)}; let it answer every input in [0, 1], in batches of any size"
        ) from error
    if classes is not None and logits.shape != (len(x), classes):
        raise ModelError(
            f"the model has {classes} classes on the clean inputs, but on {len(x)} others it gives logits of shape "
            f"{tuple(logits.shape)}; let it return the same classes for every input in [0, 1]"
        )
    return logits


@contextmanager
def named(attack: str) -> Iterator[None]:
    """A model that does not answer what an attack asks is told which one that was, and the user's line that asked."""
    try:
        yield
    except ModelError as error:
        if str(error).startswith("attack "):
            raise
        raise ModelError(f"attack {attack!r}: {error}{raised_at(error)}") from error
