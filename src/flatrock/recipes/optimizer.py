"""The optimizer section of a recipe -> the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.core.guests import is_own
from flatrock.core.rng import Seed
from flatrock.engine.loss import decayed
from flatrock.optimizers.catalog import OPTIMIZERS
from flatrock.recipes.schema import SHARED, Optimizer


def build_optimizer(section: Optimizer, model: nn.Module, seed: Seed) -> torch.optim.Optimizer:
    """The optimizer over the model's parameters; `decay_on: weights` spares biases and BatchNorm.

    A group that is not `scheduled` keeps its rate.
    """
    kept = {} if section.schedule_on == "all" else {"scheduled": False}
    if kept and section.decay_on != "weights":
        raise ConfigError(
            f"schedule_on 'decayed' needs two groups of parameters, but decay_on is {section.decay_on!r}; set "
            "optimizer.decay_on=weights, or schedule_on=all"
        )
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "weight_decay": section.weight_decay}]
    if section.decay_on == "weights":
        chosen = {id(p) for p in decayed(model)}
        groups = [
            {"params": [p for p in model.parameters() if id(p) in chosen], "weight_decay": section.weight_decay},
            {"params": [p for p in model.parameters() if id(p) not in chosen], "weight_decay": 0.0, **kept},
        ]
    taken = OPTIMIZERS.entry(section.name).options()
    for name in SHARED:
        if name not in taken and getattr(section, name):
            raise ConfigError(f"{section.name} has no {name}, got {getattr(section, name)!r}; set optimizer.{name}=0")
    shared = {name: getattr(section, name) for name in SHARED if name in taken}
    made = OPTIMIZERS.make(
        section.name, params=groups, lr=section.lr, seed=seed.child("optimizer"), **shared, **section.options
    )
    if is_own(section.name) and section.weight_decay and "weight_decay" not in made.defaults:
        raise ConfigError(
            f"{section.name} has no weight_decay, got {section.weight_decay!r}; set optimizer.weight_decay=0"
        )
    return made


def trial_model(section: Optimizer) -> nn.Module:
    """Something to make the optimizer for before there is a network: no weight is drawn, and memory is only taken where
    somebody else's code might not stand it."""
    model = nn.Linear(1, 1, device="meta")
    if is_own(section.name):
        model = model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    return model
