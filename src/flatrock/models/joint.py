"""Several batches in one pass: layers see all rows at once, but each BatchNorm every batch for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatrock.core.borrow import full_precision, kept_buffers
from flatrock.core.rng import kept_global_rng, random_states
from flatrock.models.compare import hooked, near
from flatrock.models.view import view

# Rows of each batch on which one pass and several are compared.
FEW = 16


class Joint:
    """What a network needs to take `parts` batches of one size, one after the other in memory, in one pass.

    In train mode a BatchNorm normalises each batch by its own mean and variance and updates its running statistics
    batch by batch, in order, as several passes do. The functions are made once: a compiler knows them by identity.
    """

    def __init__(self, model: nn.Module, parts: int) -> None:
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        self._forwards = [(norm, partial(_each, norm, parts)) for norm in norms]

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Inside, the BatchNorms of the network look at each batch alone."""
        try:
            for norm, forward in self._forwards:
                norm.__dict__["forward"] = forward  # not by setattr, which searches parameters and submodules first
            yield
        finally:
            for norm, _ in self._forwards:
                norm.__dict__.pop("forward", None)

    def passes(self, work: Callable[[Tensor], Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
        """What `work`, a pass of the network, gives for one input after the other."""
        with self._apart():
            found = work(torch.cat(list(inputs)))
        parts = zip(*(tensor.chunk(len(inputs)) for tensor in found), strict=True)
        return [tensor for part in parts for tensor in part]


def _each(norm: nn.Module, parts: int, x: Tensor) -> Tensor:
    return torch.cat([type(norm).forward(norm, part) for part in x.chunk(parts)])


def joint(model: nn.Module, inputs: Sequence[Tensor]) -> Joint | None:
    """How to make passes of these inputs one; None if that is something else than several passes.

    Rows that depend on each other elsewhere than in a BatchNorm are a reason, layers that toss coins, one BatchNorm
    used twice (its statistics would be taken over in another order), hooks, a layer whose pass was replaced. Judged by
    features, logits and buffers of a few rows, in the mode the network is in.
    """
    if any(hooked(m) or "forward" in m.__dict__ for m in model.modules()) or len({x.shape for x in inputs}) > 1:
        return None
    few = [x[:FEW] for x in inputs]
    way = Joint(model, len(few))
    device = few[0].device
    try:
        with kept_global_rng(device), full_precision(device), torch.no_grad():
            before = random_states()
            true = _left(model, lambda: [tensor for x in few for tensor in _pass(model, x)])
            if random_states() != before:
                return None
            got = _left(model, lambda: way.passes(partial(_pass, model), few))
    except Exception:  # of a network that counts on the size of its batches
        return None
    return way if all(map(near, got, true)) else None


def _pass(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    seen = view(model, x)
    return seen.features, seen.logits


def _left(model: nn.Module, work: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What the work gives, and the buffers it leaves; the network gets its own back."""
    with kept_buffers(model):
        return work() + [buffer.clone() for buffer in model.buffers()]
