"""Several batches in one pass: layers see all rows at once, but each BatchNorm every batch for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from flatrock.core.borrow import full_precision, kept_buffers
from flatrock.core.device import has_triton
from flatrock.core.rng import kept_global_rng, random_states
from flatrock.models.compare import hooked, near
from flatrock.models.norm import normalised, usual
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
        triton = has_triton()  # asked here: a compiler that traces a pass stumbles over the search
        self._ways = []
        for norm in norms:
            alone = partial(_each, norm, parts, triton)
            self._ways.append((norm, {"forward": alone, "activated": partial(alone, relu=True)}))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Inside, the BatchNorms of the network look at each batch alone."""
        try:
            for norm, ways in self._ways:
                norm.__dict__.update(ways)  # not by setattr, which searches parameters and submodules first
            yield
        finally:
            for norm, ways in self._ways:
                for name in ways:
                    norm.__dict__.pop(name, None)

    def passes(self, work: Callable[[Tensor], Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
        """What `work`, a pass of the network, gives for one input after the other."""
        with self._apart():
            found = work(torch.cat(list(inputs)) if len(inputs) > 1 else inputs[0])
        parts = zip(*(tensor.chunk(len(inputs)) for tensor in found), strict=True)
        return [tensor for part in parts for tensor in part]


def _each(norm: nn.Module, parts: int, triton: bool, x: Tensor, *, relu: bool = False) -> Tensor:
    """What a BatchNorm, and a ReLU behind it, give for one batch after the other."""
    if usual(norm) and norm.training:
        kernels = triton and x.is_cuda and x.dim() == 4 and norm.weight.dtype == torch.float32
        return normalised(norm, x, parts=parts, relu=relu, kernels=kernels)
    out = torch.cat([type(norm).forward(norm, part) for part in x.chunk(parts)])
    return F.relu(out) if relu else out


def joint(model: nn.Module, inputs: Sequence[Tensor]) -> Joint | None:
    """How to make passes of these inputs one, with BatchNorm and ReLU as one operation; None if that is something else.

    Hooks are a reason, and a layer whose pass was replaced; for several inputs also rows that depend on each other
    elsewhere than in a BatchNorm, layers that toss coins, one BatchNorm used twice (its statistics would be taken over
    in another order). Judged by features, logits and buffers of a few rows, in the mode the network is in.
    """
    if any(hooked(m) or "forward" in m.__dict__ for m in model.modules()) or len({x.shape for x in inputs}) > 1:
        return None
    few = [x[:FEW] for x in inputs]
    way = Joint(model, len(few))
    device = few[0].device
    try:
        with full_precision(device), torch.no_grad():
            before = random_states()
            with kept_global_rng(device):
                true = _left(model, lambda: [tensor for x in few for tensor in _pass(model, x)])
                if len(few) > 1 and random_states() != before:
                    return None
            with kept_global_rng(device):  # the same coins again
                got = _left(model, lambda: way.passes(partial(_pass, model), few))
    except Exception:  # of a network that counts on the size of its batches
        return None
    return way if all(map(near, got, true)) else None


def _pass(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    seen = view(model, x)
    return seen.features, seen.logits


def _left(model: nn.Module, work: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What the work gives, and copies of the buffers it leaves; the network gets its own back."""
    with kept_buffers(model):
        found = work()
        for module in model.modules():
            held = dict(module.named_buffers(recurse=False))
            if isinstance(module, _BatchNorm) and "running_mean" in held:
                # As one: what rounding makes of a mean that should be 0 is measured by its variance.
                found.append(torch.cat([held.pop("running_mean"), held.pop("running_var")]))
            found += [buffer.clone() for buffer in held.values()]
    return found
