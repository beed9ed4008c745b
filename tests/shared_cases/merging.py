"""A layer that does more than change its mode."""

from __future__ import annotations

import torch
from torch import nn


class Merging(nn.Linear):
    """A layer whose weight holds what was learnt beside it in eval mode alone, as LoRA's does."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.beside, self.merged = nn.Parameter(torch.ones(2, 3)), False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += -self.beside if mode else self.beside
            self.merged = not mode
        return self
