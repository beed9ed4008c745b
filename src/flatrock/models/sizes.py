"""Few sizes of batches for a GPU: cuDNN prepares every layer anew for each size, and recordings are of one size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Sizes are powers of two up to this, then its multiples, and from 1024 on 16 for each doubling.
MULTIPLE = 32


def rounded(count: int) -> int:
    """The size that serves a batch of `count` rows: never twice as many, so that halves of a batch need less memory."""
    doubled = 1 << max(count - 1, 0).bit_length()
    if count <= MULTIPLE:
        return min(count, 1) * doubled
    step = max(MULTIPLE, doubled // MULTIPLE)
    return -(-count // step) * step


def size_for(x: Tensor) -> int:
    """The size this batch is best given: on the CPU its own."""
    return rounded(x.shape[0]) if x.is_cuda else x.shape[0]


def filled(work: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """What `work`, which must treat every row for itself, says of x when zeros fill it up to `size` rows."""
    count = x.shape[0]
    if count >= size:
        return work(x)
    return work(torch.cat([x, x.new_zeros(size - count, *x.shape[1:])]))[:count]


class Filled(nn.Module):
    """A network, whose rows must not depend on each other, asked about few sizes of batches only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: Tensor) -> Tensor:
        """What the network says."""
        return filled(self.inner, x, size_for(x))
