"""Several batches in one pass: layers see all rows at once, but each BatchNorm every batch for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatrock.core.borrow import full_precision, kept_buffers
from flatrock.core.rng import kept_global_rng

# Rows of each batch on which one pass and several are compared.
FEW = 16
# Largest difference between them, relative to the largest logit, that rounding in float32 explains.
ROUNDING = 1e-3


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
    """How to make passes of these inputs one; None if the network then gives other answers.

    Rows that depend on each other elsewhere than in a BatchNorm, dropout and hooks are reasons. Compared on a few rows,
    in the mode the network is in.
    """
    if any(_watched(m) for m in model.modules()) or len({x.shape for x in inputs}) > 1:
        return None
    few = [x[:FEW] for x in inputs]
    way = Joint(model, len(few))
    device = few[0].device
    with kept_buffers(model), kept_global_rng(device), full_precision(device), torch.no_grad():
        true = torch.cat([model(x) for x in few])
        try:
            got = torch.cat(way.passes(lambda x: (model(x),), few))
        except Exception:  # of a network that counts on the size of its batches
            return None
    same = got.shape == true.shape and float((got - true).abs().max()) <= ROUNDING * float(true.abs().max())
    return way if same else None


def _watched(module: nn.Module) -> bool:
    """Whether someone wants to know of every pass, or has changed this layer's pass already."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__
