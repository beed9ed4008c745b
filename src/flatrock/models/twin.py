"""A fast copy of a network for attacks during training: fused, in reduced precision, following its weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.borrow import mode
from flatrock.core.rng import Seed
from flatrock.models.classifier import Classifier
from flatrock.models.fused import fused
from flatrock.models.fused_layers import Affine, follow
from flatrock.models.replay import Replay

# Largest difference from the network, relative to its largest logit, that rounding in float32 explains.
ROUNDING = 1e-3
# Inputs on which copy and network are compared once.
COMPARED = 8


class Twin(nn.Module):
    """The network in eval mode, in `dtype`, taking and returning float32; `follow()` brings it up to date.

    On a GPU its passes, forward and backward, are recorded and replayed. Only gradients of the input exist.
    """

    def __init__(self, model: Classifier, dtype: torch.dtype) -> None:
        super().__init__()
        self._source = [model]  # in a list, so that the network does not become a part of its twin
        self.inner, self.plain = _faithful(model)
        self._affines = [m for m in self.inner.modules() if isinstance(m, Affine)]
        self._norms = [model.get_submodule(m.source) for m in self._affines]
        self.inner.to(dtype).requires_grad_(False)
        if any(p.dim() == 4 for p in self.inner.parameters()):
            self.inner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._mine, self._theirs = _pairs(self.inner, model)
        self._dtype = dtype
        self._replay = Replay(self._pass, gradients=True)
        self.eval()

    def follow(self) -> None:
        """Take over the weights and statistics the network has now."""
        with torch.no_grad():
            state = _tensors(self._source[0])
            if self._mine:
                torch._foreach_copy_(self._mine, [state[name].detach() for name in self._theirs])
            follow(self._affines, self._norms)

    def forward(self, x: Tensor) -> Tensor:
        """Float32 logits."""
        return self._replay(x) if self.plain else self._pass(x)

    def _pass(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype)
        logits: Tensor = self.inner(x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x)
        return logits.float()


def _faithful(model: Classifier) -> tuple[nn.Module, bool]:
    """The fused copy; not traced if the trace turns out to be another function than the network."""
    tensor = next(model.parameters())
    x = torch.rand(COMPARED, *model.input_shape, generator=Seed(0).child("twin").generator())
    x = x.to(device=tensor.device, dtype=tensor.dtype)
    with mode(model, training=False), torch.no_grad():
        true = model(x)
        inner, plain = fused(copy.deepcopy(model))
        same = float((inner(x) - true).abs().max()) <= ROUNDING * float(true.abs().max())
        return (inner, plain) if same else fused(copy.deepcopy(model), trace=False)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, shared ones under each of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def _pairs(inner: nn.Module, model: nn.Module) -> tuple[list[Tensor], list[str]]:
    """Tensors of the copy and the names of those they follow; a padded convolution follows in its first channels."""
    theirs = _tensors(model)
    mine, names = [], []
    for name, tensor in [*inner.named_parameters(), *inner.named_buffers()]:
        owner, _, last = name.rpartition(".")
        module: Any = inner.get_submodule(owner)
        names.append(f"{module.source}.{last}" if hasattr(module, "source") else name)
        source = theirs[names[-1]]
        mine.append(tensor.detach() if tensor.shape == source.shape else tensor.detach()[:, : source.shape[1]])
    return mine, names
