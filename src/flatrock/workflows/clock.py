"""Time on a device: a processor's clock, or marks that a GPU passes."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


def now(device: torch.device) -> Mark:
    """The time, or a mark in the queue of a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record(torch.cuda.current_stream(device))
    return mark


def between(begun: Mark, ended: Mark) -> float:
    """Seconds from one mark to the next; a GPU must have passed both."""
    if isinstance(begun, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return float(begun.elapsed_time(ended)) / 1000
    assert isinstance(begun, float)
    assert isinstance(ended, float)
    return ended - begun


def wait(device: torch.device) -> None:
    """Until everything asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
