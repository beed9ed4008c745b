"""Passes of a network on a GPU, recorded once per size of batches and replayed: small batches then cost no launches."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import in_words
from flatrock.models.sizes import MULTIPLE, rounded

# Batches up to this size are recorded; the kernels of larger ones take longer than launching them.
LARGEST = 1024
# A pass of a size is recorded when it is met this often, work of many passes the second time: recording costs as much
# as a few times doing it.
OFTEN = {"pass": 8, "whole": 2}
# No more is counted than this; who names everything anew gains nothing from recordings.
COUNTED = 1000
# Nothing is recorded where less than this share of the GPU's memory is free: recordings keep memory of their own.
FREE = 0.1


Work = Callable[[Tensor], Tensor]


class _Clock:
    """Counts replays. Recordings share memory: each may overwrite what another left for its gradient."""

    def __init__(self) -> None:
        self.turn = 0

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Do what was recorded."""
        graph.replay()
        self.turn += 1


@dataclass
class _Recording:
    """A forward pass and, if asked for, the backward pass that belongs to it."""

    clock: _Clock
    forward: torch.cuda.CUDAGraph
    x: Tensor
    logits: Tensor
    backward: torch.cuda.CUDAGraph | None = None
    grad_logits: Tensor | None = None
    grad_x: Tensor | None = None

    def answer(self, x: Tensor) -> Tensor:
        """Replay the forward pass on these rows."""
        self.x.detach()[: x.shape[0]].copy_(x)
        self.clock.replay(self.forward)
        return self.logits.detach()[: x.shape[0]].clone()


@dataclass
class _Whole:
    """Work of any number of passes as one recording."""

    clock: _Clock
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor

    def answer(self, tensors: Sequence[Tensor]) -> Tensor:
        """Replay it on the rows of these tensors."""
        count = tensors[0].shape[0]
        for mine, given in zip(self.inputs, tensors, strict=True):
            mine[:count].copy_(given.detach())
        self.clock.replay(self.graph)
        return self.output[:count].clone()


class _Through(torch.autograd.Function):
    """A replayed forward pass whose gradient is a replayed backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recording: _Recording) -> Tensor:
        ctx.save_for_backward(x)
        ctx.recording = recording
        out = recording.answer(x)
        ctx.turn = recording.clock.turn
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        recording: _Recording = ctx.recording
        (x,) = ctx.saved_tensors
        if recording.clock.turn != ctx.turn:  # something replayed since then has overwritten what this pass left
            recording.answer(x)
        assert recording.backward is not None
        assert recording.grad_logits is not None
        assert recording.grad_x is not None
        recording.grad_logits[: x.shape[0]].copy_(grads[0])
        recording.clock.replay(recording.backward)
        return recording.grad_x[: x.shape[0]].clone(), None


class Replay:
    """Does work on batches; a size that comes often is recorded as a CUDA graph.

    The work, always the same, must be a plain sequence of GPU operations that treats every row for itself (rows that
    fill a batch up to a recorded size hold whatever was there before), on tensors that stay where they are in memory;
    their values may change. With `gradients` gradients of x are recorded too; without, they do not pass.
    """

    def __init__(self, *, gradients: bool = False) -> None:
        self._gradients = gradients
        self._met: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, _Recording] = {}
        self._wholes: dict[Hashable, _Whole] = {}
        self.refused: dict[str, str] = {}  # what is not recorded any more, and why; recordings there are serve on
        self._inside = False  # of work that is, or will be, recorded as a whole
        self._clock = _Clock()
        self._pool: Any = None
        self._stream: Any = None  # of its own: torch's, for all recordings, is of the device used first

    def __call__(self, work: Work, x: Tensor) -> Tensor:
        """What `work` says of x. It is not kept: its owner owns this, and would never be freed."""
        if self._inside or not _fits(x):
            return work(x)
        through = self._gradients and x.requires_grad and torch.is_grad_enabled()
        key = (through, _room(x.shape[0]), *x.shape[1:])
        with torch.cuda.device(x.device):
            if key not in self._recorded and self._is_due("pass", key):
                room = torch.zeros(key[1:], dtype=x.dtype, device=x.device, requires_grad=through)
                if self._rehearsed("pass", lambda: _both_ways(work, room)):
                    self._recorded[key] = self._record(work, room)
            recording = self._recorded.get(key)
            if recording is None:
                return work(x)
            out: Tensor = _Through.apply(x, recording) if through else recording.answer(x)  # type: ignore[no-untyped-call]
            return out

    def whole(self, name: Hashable, work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """What `work` makes of these tensors: many passes and what lies between them as one recording.

        The result has a row for each row of the tensors. Beside them the work may depend only on its name (what differs
        in anything else must have another) and draws no random numbers; no gradient passes.
        """
        if self._inside or not _fits(tensors[0]) or not _hashable(name):
            return work(*tensors)
        key = (name, *((_room(t.shape[0]), *t.shape[1:], t.dtype) for t in tensors))
        if "whole" in self.refused and key not in self._wholes:
            return work(*tensors)  # its passes may still be recorded one by one
        with torch.cuda.device(tensors[0].device), self._as_a_whole():
            if key not in self._wholes and self._is_due("whole", key):
                room = [_padded(t.detach()) for t in tensors]
                if self._rehearsed("whole", lambda: work(*room)):
                    self._wholes[key] = self._record_whole(work, room)
            return self._wholes[key].answer(tensors) if key in self._wholes else work(*tensors)

    @contextmanager
    def _as_a_whole(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _is_due(self, kind: str, key: Hashable) -> bool:
        """Whether this was met often enough, now included."""
        if kind in self.refused:
            return False
        if len(self._met) >= COUNTED:
            self._met.clear()
        self._met[kind, key] += 1
        return self._met[kind, key] >= OFTEN[kind]

    def _rehearsed(self, kind: str, work: Callable[[], object]) -> bool:
        """Whether the work ran without waiting for the GPU, which a recording cannot, and memory is left.

        A recording that breaks off would leave torch's random generator unusable, so it is not simply tried.
        """
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():  # torch tells once that it does not know of every wait
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):  # libraries choose and allocate on the first call of a shape
                work()
        except RuntimeError as error:
            self.refused[kind] = in_words(error)
        finally:
            torch.cuda.set_sync_debug_mode(before)
            torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.empty_cache()  # what the rehearsal took is not taken
        free, total = torch.cuda.mem_get_info()
        if free <= FREE * total:
            self.refused.setdefault(kind, f"{free / 2**30:.1f} of {total / 2**30:.0f} GiB are free, too few")
        return kind not in self.refused

    def _record(self, work: Work, x: Tensor) -> _Recording:
        forward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool, stream=self._stream):
            logits = work(x)
        self._pool = forward.pool()
        recording = _Recording(self._clock, forward, x, logits)
        if x.requires_grad:
            recording.grad_logits = torch.zeros_like(logits.detach())
            recording.backward = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recording.backward, pool=self._pool, stream=self._stream):
                # Kept: what the forward pass saved must not be given to a later recording.
                (grad,) = torch.autograd.grad(logits, x, recording.grad_logits, retain_graph=True)
            recording.grad_x = grad
        return recording

    def _record_whole(self, work: Callable[..., Tensor], tensors: list[Tensor]) -> _Whole:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = work(*tensors)
        self._pool = graph.pool()
        return _Whole(self._clock, graph, tensors, output)


def _fits(x: Tensor) -> bool:
    return x.is_cuda and 0 < x.shape[0] <= LARGEST


def _hashable(name: Hashable) -> bool:
    """Whether it can be a key; a tuple that holds something mutable cannot."""
    try:
        hash(name)
    except TypeError:
        return False
    return True


def _room(count: int) -> int:
    """The size whose recording serves a batch of this size."""
    return rounded(max(count, MULTIPLE))


def _padded(x: Tensor) -> Tensor:
    """A copy whose rows, zeros at the end, are as many as a recording has."""
    room = x.new_zeros(_room(x.shape[0]), *x.shape[1:])
    room[: x.shape[0]].copy_(x)
    return room


def _both_ways(work: Work, x: Tensor) -> None:
    """A forward pass and, if x wants its gradient, a backward pass."""
    logits = work(x)
    if x.requires_grad:
        torch.autograd.grad(logits, x, torch.zeros_like(logits))
