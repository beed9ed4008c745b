"""The base of every network here: normalisation inside, one linear head on named features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.types import View


def check_shape(x: Tensor | fx.Proxy, shape: tuple[int, ...], name: str) -> None:
    """Inputs are [n, *shape]; else ModelError. What stands for a tensor while a network is traced has no shape."""
    if isinstance(x, Tensor) and x.shape[1:] != shape:
        expected = ", ".join(str(size) for size in shape)
        cure = "resize the inputs, or create a model made for them"
        if x.shape == shape:
            cure = "give a batch of one: x[None]"
        raise ModelError(f"{name} expects inputs of shape [n, {expected}], got {list(x.shape)}; {cure}")


class Classifier(nn.Module, ABC):
    """Maps inputs in [0, 1] to logits: head(embed((x - mean) / std)).

    A subclass sets `head` and writes `embed`. Without normalisation the buffers `mean` and `std` are None: nothing is
    computed, and loading the weights of a normalised network fails by name instead of giving wrong logits.
    """

    head: nn.Linear
    # What a reader of this model's numbers must know, for example 'test-selected'; set when weights are loaded.
    marks: tuple[str, ...] = ()
    mean: Tensor | None
    std: Tensor | None

    def __init__(self, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
            raise ConfigError(f"num_classes must be an integer of at least 2, got {num_classes!r}")
        self.input_shape = input_shape
        self.num_classes = num_classes
        self.register_buffer("mean", None)
        self.register_buffer("std", None)

    def set_normalization(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Normalise inputs per channel (first axis of an input); a single value serves every channel."""
        channels = self.input_shape[0]
        for what, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise ConfigError(
                    f"normalisation {what} has {len(values)} values but {type(self).__name__} takes {channels} "
                    f"channel(s); give {channels} value(s), or one for all"
                )
        self.mean, self.std = self._per_channel(mean), self._per_channel(std)

    def _per_channel(self, values: Sequence[float]) -> Tensor:
        like = self.head.weight
        row = torch.tensor(list(values), dtype=like.dtype, device=like.device)
        # Own memory for every channel: an expanded tensor could not be copied into when weights are loaded.
        return row.expand(self.input_shape[0]).contiguous().reshape(-1, *[1] * (len(self.input_shape) - 1))

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """Features [n, d] of normalised inputs: what the head is applied to."""

    def features(self, x: Tensor) -> Tensor:
        """Features [n, d] of inputs in [0, 1]."""
        check_shape(x, self.input_shape, type(self).__name__)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / self.std
        return self.embed(x)

    def view(self, x: Tensor) -> View:
        """One pass that keeps the input of the head beside its output."""
        features = self.features(x)
        return View(features=features, logits=self.head(features))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, num_classes]."""
        return self.view(x).logits
