"""What the attack tests share: types of their fixtures, random numbers, and who is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.rng import SampleGen, Seed

Make = Callable[..., Any]
Row = tuple[str, dict[str, Any]]
# Attacks of thousands of queries, made quick where any number of them tests the same.
QUICK: dict[str, dict[str, Any]] = {"square": {"queries": 60}, "rays": {"queries": 150}}
# Attacks that draw no random numbers, and attacks that know one norm only.
UNRANDOM = {"fgsm", "rays"}
LINF_ONLY = {"rays"}


def gpu_waits(do: Callable[[], object]) -> int:
    """How often the CPU has to wait for the GPU while something is done."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            do()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


class Recorder(nn.Module):
    """Remembers every input it was asked about."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        logits: Tensor = self.model(x)
        return logits


def gen_for(x: Tensor, seed: int = 0) -> SampleGen:
    return Seed(seed).child("test").samples(torch.arange(len(x)))


def wrong(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).argmax(1) != y
