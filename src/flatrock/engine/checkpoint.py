"""Model and optimizer as named tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.errors import StateError


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under 'model/'; they are the live ones until saved."""
    return {f"model/{k}": v for k, v in model.state_dict().items()}


def put_model(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load the 'model/' tensors; StateError lists what does not fit."""
    state = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    got = {k: tuple(v.shape) for k, v in state.items()}
    if expected != got:
        odd = sorted(k for k in expected.keys() | got.keys() if expected.get(k) != got.get(k))
        raise StateError(f"{path} does not fit this model: {len(odd)} tensors differ, first {odd[:3]}")
    model.load_state_dict(state)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as named tensors and plain numbers."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            key = f"optim/{index}/{name}"
            if isinstance(value, Tensor):
                tensors[key] = value
            elif value is not None:
                numbers[key] = value
    return tensors, numbers


def put_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Inverse of optimizer_tensors; the groups' options come from the recipe, not from the file."""
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *numbers.items()]:
        if key.startswith("optim/"):
            _, index, name = key.split("/", 2)
            state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
