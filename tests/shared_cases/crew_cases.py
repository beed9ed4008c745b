"""Networks that fail in a process beside this one only: importable there, too."""

from __future__ import annotations

import os
from multiprocessing import parent_process

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """Two numbers, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 2.0], [-1.0, -1.0]]))
            self.layer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Noisy(Linear):
    """Answers at random."""

    def __init__(self, noise: float = 0.2) -> None:
        super().__init__()
        self.noise = noise
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.4 + self.noise * torch.randn_like(x))


class Failing(Linear):
    """Raises in the other process."""

    def forward(self, x: Tensor) -> Tensor:
        if parent_process() is not None:
            raise ValueError("no such luck")
        return super().forward(x)


class Dying(Linear):
    """Ends the other process without a word."""

    def forward(self, x: Tensor) -> Tensor:
        if parent_process() is not None:
            os._exit(3)
        return super().forward(x)
