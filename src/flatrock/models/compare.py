"""What to look at before one way of computing a network stands in for another."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Largest difference, relative to the largest number of a tensor, that rounding in float32 explains.
ROUNDING = 1e-3


def near(got: Tensor, true: Tensor) -> bool:
    """Equal up to rounding, integers exactly; tensors may be empty. NaN is near nothing."""
    if got.shape != true.shape:
        return False
    if not true.is_floating_point():
        return torch.equal(got, true)
    largest = true.double().abs().amax() if true.numel() else 0.0
    return bool(((got.double() - true.double()).abs() <= ROUNDING * largest).all())


def hooked(module: nn.Module) -> bool:
    """Whether someone wants to know of, or change, the passes of this layer; another way of computing would not."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)
