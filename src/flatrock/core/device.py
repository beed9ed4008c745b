"""Where to compute, and with what."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch

from flatrock.core.errors import ConfigError


@cache
def has_triton() -> bool:
    """Whether kernels of our own can be made here."""
    return find_spec("triton") is not None


# One device, or several that share the work: the first one leads.
Devices = torch.device | str | Sequence[torch.device | str]


def each_device(devices: Devices) -> list[torch.device | str]:
    """One by one, whether they exist or not; at least one."""
    found = [devices] if isinstance(devices, torch.device | str) else list(devices)
    if not found:
        raise ConfigError("no device is named; use auto, cpu, cuda or a list such as ['cuda:0', 'cuda:1']")
    return found


def named_devices(text: str) -> list[str]:
    """Devices between commas, whether they exist or not; 'all' are the CUDA devices there are, or the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text.strip() == "all":
        return [f"cuda:{i}" for i in range(count)] or ["cpu"]
    return [word.strip() for word in text.split(",")]


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


def pick_devices(devices: Devices) -> list[torch.device]:
    """Each of them; all must exist."""
    return [pick_device(one) for one in each_device(devices)]


def kind_fault(devices: Sequence[torch.device]) -> str:
    """What is wrong with devices that are to share work and are of different kinds; nothing if they are of one."""
    if len({device.type for device in devices}) == 1:
        return ""
    return f"devices: got {', '.join(map(str, devices))}; name devices of one kind"


def alike_devices(devices: Devices) -> list[torch.device]:
    """As pick_devices; they must be of one kind."""
    found = pick_devices(devices)
    if fault := kind_fault(found):
        raise ConfigError(fault)
    return found


def shared_by(devices: Sequence[torch.device]) -> dict[str, list[str]]:
    """For the provenance: who shared the work, if somebody did; its seconds are then those of all together."""
    return {"devices": [str(device) for device in devices]} if len(devices) > 1 else {}


# What libraries say for want of memory: CUDA's runtime, NCCL and Triton; cuBLAS, cuDNN and their kin; torch on the CPU.
SHORT = ("out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED", "DefaultCPUAllocator")


def memory_is_short(error: BaseException) -> bool:
    """Whether this is want of memory: torch's own on a GPU has a class; of the others only the message tells."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SHORT)


def free_memory(device: torch.device, *, compiled: bool = False) -> int:
    """Give back what nobody uses, forget old peaks; the bytes that are still taken. What is compiled may stay."""
    if not compiled:
        torch.compiler.reset()
    gc.collect()
    # torch refuses to ask a device by its number before that.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_reserved(device)
