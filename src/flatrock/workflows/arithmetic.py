"""How much arithmetic something is, and how much of it a device can do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from flatrock.core.rng import Seed
from flatrock.workflows.clock import between, now, wait

# Side of the square matrices whose product tells what the device can do at most.
CEILING_SIDE = {"cuda": 8192, "cpu": 1024}


class Arithmetic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts by torch's own formulas. (Its FlopCounterMode watches modules, which gradients of inputs do not allow.)"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: float = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def matmul_ceiling(device: torch.device) -> float:
    """TFLOP/s of a large square matrix product, bfloat16 on a GPU and float32 elsewhere: the best of ten."""
    side = CEILING_SIDE.get(device.type, CEILING_SIDE["cpu"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = Seed(0).generator(device)  # not ones: a GPU is faster on numbers that do not change
    a, b = (torch.randn(side, side, dtype=dtype, device=device, generator=draw) for _ in range(2))
    best = math.inf
    for _ in range(10):
        begun = now(device)
        torch.mm(a, b)
        ended = now(device)
        wait(device)
        best = min(best, between(begun, ended))
    return 2 * side**3 / best / 1e12
