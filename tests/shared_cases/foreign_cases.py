"""What the tests of foreign models share: a module of factories for 1x8x8 inputs, inputs, outputs, a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from foreign_nets import WideNet, randomised
from torch import Tensor, nn

from flatrock.core.rng import Seed

MODULE = """
import torch
from torch import nn

class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 1, 1))
        self.register_buffer("std", torch.ones(1, 1, 1))
        self.model = net()

    def forward(self, x):
        return self.model((x - self.mean) / self.std)

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

class Noted(nn.Linear):
    def get_extra_state(self):
        return {"note": "no tensor"}

    def set_extra_state(self, state):
        pass

def noted():
    return nn.Sequential(nn.Flatten(), Noted(64, 10))

def eleven():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 11))

def large():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

def double():
    return net().double()

def sequence():
    return nn.Flatten(0)
"""


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(*shape, generator=Seed(2).generator(), dtype=dtype)


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    assert not any(m.training for m in model.modules())
    with torch.no_grad():
        return model(x)


def wide_file(folder: Path, **more: Any) -> tuple[Path, nn.Module]:
    net = randomised(WideNet(10, 1)).float()
    torch.save({"state_dict": {f"module.{k}": v for k, v in net.state_dict().items()} | more}, folder / "wide.pt")
    return folder / "wide.pt", net
