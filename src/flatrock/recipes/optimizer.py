"""The optimizer section of a recipe -> the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.engine.loss import decayed
from flatrock.optimizers.catalog import OPTIMIZERS
from flatrock.recipes.schema import Optimizer

# Keys of the section that are options of those optimizers that have them.
SHARED = ("momentum", "nesterov")


def build_optimizer(section: Optimizer, model: nn.Module, seed: Seed) -> torch.optim.Optimizer:
    """The optimizer over the model's parameters; `decay_on: weights` spares biases and BatchNorm."""
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "weight_decay": section.weight_decay}]
    if section.decay_on == "weights":
        chosen = {id(p) for p in decayed(model)}
        groups = [
            {"params": [p for p in model.parameters() if id(p) in chosen], "weight_decay": section.weight_decay},
            {"params": [p for p in model.parameters() if id(p) not in chosen], "weight_decay": 0.0},
        ]
    taken = OPTIMIZERS.entry(section.name).options()
    for name in SHARED:
        if name not in taken and getattr(section, name):
            raise ConfigError(f"{section.name} has no {name}, got {getattr(section, name)!r}; set optimizer.{name}=0")
    shared = {name: getattr(section, name) for name in SHARED if name in taken}
    return OPTIMIZERS.make(
        section.name, params=groups, lr=section.lr, seed=seed.child("optimizer"), **shared, **section.options
    )
