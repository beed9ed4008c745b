"""Networks of recipes that several processes train: one that works, others that fail in the second process."""

from __future__ import annotations

import atexit
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Slow(nn.Module):
    """Takes its time where the environment says so."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(float(os.environ.get("SECONDS_A_PASS", "0")))
        return x


def mlp(num_classes: int, hidden: int) -> nn.Module:
    """Two layers, on 8x8 grey images."""
    return nn.Sequential(Slow(), nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))


class Net(nn.Module):
    """Linear, on 8x8 grey images."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(1))
        return out


def _second() -> bool:
    return dist.is_initialized() and dist.get_rank() == 1


class Raising(Net):
    """Fails in the second process."""

    def forward(self, x: Tensor) -> Tensor:
        if _second() and torch.is_grad_enabled():
            raise ValueError("no such luck")
        return super().forward(x)


class Dying(Net):
    """Ends the second process without a word."""

    def forward(self, x: Tensor) -> Tensor:
        if _second() and torch.is_grad_enabled():
            os._exit(3)
        return super().forward(x)


class Talking(Net):
    """Says when it is made in the second process, and when Python is taken apart there."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        if _second():
            sys.stdout.write("made\n")
            atexit.register(sys.stdout.write, "taken apart\n")


class Gathering(Net):
    """Keeps something of its own of every batch, which nobody averages."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + x.detach().sum()
        return super().forward(x)


class Branched(Net):
    """A layer beside the one of all samples, of the whole batch or of some of it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.first = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        out: Tensor = self.head(flat + self.first(flat))
        return out


class Choosy(Branched):
    """A layer of it is trained in the second process only."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.first.requires_grad_(_second())


class Thawing(Branched):
    """A layer of it is trained from the middle of an epoch on, in the second process only."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.first.requires_grad_(False)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training and torch.is_grad_enabled()
        self.first.requires_grad_(_second() and self.steps > 3)
        return super().forward(x)


class Routed(Branched):
    """The layer is for bright samples, which are rare; without any it is skipped."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        bright = flat.mean(1, keepdim=True) > 0.37
        if bright.any():
            flat = torch.where(bright, flat + self.first(flat), flat)
        out: Tensor = self.head(flat)
        return out
