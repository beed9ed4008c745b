"""What the attack tests share: types of their fixtures, random numbers, and who is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.rng import SampleGen, Seed

Make = Callable[..., Any]
Row = tuple[str, dict[str, Any]]


def gen_for(x: Tensor, seed: int = 0) -> SampleGen:
    return Seed(seed).child("test").samples(torch.arange(len(x)))


def wrong(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).argmax(1) != y
