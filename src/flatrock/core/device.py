"""Where to compute, and with what."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from flatrock.core.errors import ConfigError


@cache
def has_triton() -> bool:
    """Whether kernels of our own can be made here."""
    return find_spec("triton") is not None


def pick_device(device: torch.device | str) -> torch.device:
    """'auto' is CUDA where there is one, else the CPU; anything else must exist."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:0") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; use auto, cpu, cuda or cuda:0")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise ConfigError(f"device {device!r} asked for, but torch sees {count} CUDA devices; use cpu")
    return chosen
