"""One kernel for a whole update: which optimizers of torch's take it, and how they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=torch.optim.Optimizer)


def fused_on_gpu(plain: T, fused: Callable[..., T], options: Mapping[str, Any]) -> T:
    """The plain optimizer, or if all its parameters lie on GPUs the fused one of the same groups and options."""
    if not all(p.is_cuda for group in plain.param_groups for p in group["params"]):
        return plain
    groups = [{k: v for k, v in group.items() if k not in ("fused", "foreach")} for group in plain.param_groups]
    return fused(groups, **options)
