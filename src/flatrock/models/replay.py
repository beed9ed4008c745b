"""Forward passes on a GPU, recorded once per batch size and replayed: small batches then cost no launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Batches up to this size are recorded; the kernels of larger ones take longer than launching them.
LARGEST = 1024
# Sizes are rounded up to a multiple of this, so that few recordings serve many sizes.
MULTIPLE = 32
# A size is recorded when it is met this often: recording costs a few passes.
OFTEN = 8
# Nothing is recorded where less than this share of the GPU's memory is free: recordings keep memory of their own.
FREE = 0.1


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    x: Tensor
    logits: Tensor


class Replay:
    """Calls `work` on batches without gradients; a size that comes often is recorded as a CUDA graph.

    `work` must be a plain sequence of GPU operations that treats every row for itself: rows that fill a batch up to
    a recorded size hold whatever was there before.
    """

    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        self._work = work
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._recorded: dict[tuple[int, ...], _Recording] = {}
        self._pool: Any = None
        self._refused = False

    def __call__(self, x: Tensor) -> Tensor:
        """What `work` says of x; gradients do not pass."""
        if self._refused or not x.is_cuda or not 0 < x.shape[0] <= LARGEST:
            return self._work(x)
        key = (-(-x.shape[0] // MULTIPLE) * MULTIPLE, *x.shape[1:])
        recording = self._recorded.get(key)
        if recording is None:
            self._seen[key] += 1
            if self._seen[key] < OFTEN:
                return self._work(x)
            tensor = torch.zeros(key, dtype=x.dtype, device=x.device)
            self._refused = not self._rehearsed(tensor)
            if self._refused:
                return self._work(x)
            recording = self._recorded[key] = self._record(tensor)
        recording.x[: x.shape[0]].copy_(x)
        recording.graph.replay()
        return recording.logits[: x.shape[0]].clone()

    def _rehearsed(self, x: Tensor) -> bool:
        """Whether a pass of this size ran without waiting for the GPU, which a recording cannot, and memory is left.

        A recording that breaks off would leave torch's random generator unusable, so it is not simply tried.
        """
        before = torch.cuda.get_sync_debug_mode()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        try:
            torch.cuda.set_sync_debug_mode("error")
            with torch.cuda.stream(side):  # libraries choose and allocate on the first call of a shape
                self._work(x)
        except RuntimeError:
            return False
        finally:
            torch.cuda.set_sync_debug_mode(before)
            torch.cuda.current_stream().wait_stream(side)
        free, total = torch.cuda.mem_get_info()
        return free > FREE * total

    def _record(self, x: Tensor) -> _Recording:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._work(x)
        self._pool = graph.pool()
        return _Recording(graph, x, logits)
