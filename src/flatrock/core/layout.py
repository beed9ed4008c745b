"""How the numbers of a tensor lie in memory: kernels that take many tensors at once want them alike."""

from __future__ import annotations

import torch
from torch import Tensor


def layout_of(x: Tensor) -> torch.memory_format:
    """Channels last if that is how the images lie, else contiguous."""
    return torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, or a copy of it, on the device and in the memory layout of another."""
    if tensor.device == like.device and tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
