"""Borrow something of the user's model and give it back exactly, even on error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flatrock.core.rng import kept_global_rng

# Who borrows a module: one thread at a time. Not attributes of modules, which are copied and pickled.
_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_LOOKING_UP = Lock()


@contextmanager
def exclusive(*models: nn.Module | None) -> Iterator[None]:
    """These networks for one thread alone, as often as it asks; others wait, or would give back what is borrowed.

    Every module has a lock, so that wrappers of one network, and networks that share parts, exclude each other. Locks
    are taken in one order: who needs several networks asks for all at once, and no two threads wait for each other.
    """
    modules = {id(m): m for model in models if model is not None for m in model.modules()}
    with _LOOKING_UP:
        locks = [_LOCKS.setdefault(modules[key], RLock()) for key in sorted(modules)]
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put the model in train or eval mode; afterwards every module has its own mode back.

    Modes are saved per module, so a BatchNorm the user froze stays frozen. A module with a `train` of its own, which
    may do more than set the mode (LoRA merges weights), is also asked to go back; how exactly it does is its own.
    """
    # A frozen TorchScript module has no mode: it is in eval mode for good.
    saved = [(m, getattr(m, "training", False)) for m in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        try:
            for module, was in saved:  # parents first: each is asked after what it, or a parent, did to it
                if type(module).train is not nn.Module.train and getattr(module, "training", was) != was:
                    module.train(was)
        finally:
            for module, was in saved:
                module.training = was


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Undo whatever happens to buffers inside (BatchNorm statistics, counters)."""
    held = [(m, name, buffer) for m in model.modules() for name, buffer in m.named_buffers(recurse=False)]
    buffers = [buffer for _, _, buffer in held]
    values = copies(buffers)
    try:
        yield
    finally:
        put(buffers, values)
        for module, name, buffer in held:
            now = module._buffers  # of a TorchScript module no dict: it has no `get`
            if name not in now or now[name] is not buffer:  # a module may have put another tensor in its place
                setattr(module, name, buffer)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """New tensors with these values."""
    values = [torch.empty_like(t, requires_grad=False) for t in tensors]
    put(values, tensors)
    return values


@torch.no_grad()
def put(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors, those of one kind in one launch: a network has many small ones."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(i)
    for chosen in kinds.values():
        torch._foreach_copy_([tensors[i] for i in chosen], [values[i] for i in chosen])


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Switch requires_grad off for all parameters: a gradient of the input then costs no weight gradient."""
    saved = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for p, _ in saved:
            p.requires_grad_(False)
        yield
    finally:
        for p, was in saved:
            p.requires_grad_(was)


@contextmanager
def nudged(model: nn.Module, shift: Mapping[str, Tensor], *, keep_change: bool = False) -> Iterator[None]:
    """Add `shift` to the named parameters inside; afterwards the old values are copied back bit by bit.

    With keep_change, what happened to the weights inside is carried over to the old values,
    w <- w + (w_inside - (w + shift)): exactly w if nothing happened, and w itself after an error.
    """
    if not shift:
        yield
        return
    parameters = dict(model.named_parameters())
    deltas = list(shift.values())

    def now() -> list[Tensor]:  # asked for each time: whoever steps inside may put other data into a parameter
        return [parameters[name].detach() for name in shift]

    saved = copies(now())
    moved: tuple[Tensor, ...] | list[Tensor] | None = None
    try:
        with torch.no_grad():
            torch._foreach_add_(now(), deltas)
        yield
        with torch.no_grad():
            moved = torch._foreach_add(saved, deltas) if keep_change else None  # all that takes memory
    finally:
        if moved is None:
            put(now(), saved)
        else:
            with torch.no_grad():
                torch._foreach_sub_(now(), moved)
                torch._foreach_add_(now(), saved)


@contextmanager
def full_precision(device: torch.device | str) -> Iterator[None]:
    """No autocast, and on a GPU no TF32: float32 means float32 inside; the user's settings come back afterwards."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    saved = [b.fp32_precision for b in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(torch.device(device).type, enabled=False):
            yield
    finally:
        for backend, was in zip(backends, saved, strict=True):
            backend.fp32_precision = was


@contextmanager
def borrowed(model: nn.Module, device: torch.device | str) -> Iterator[None]:
    """The model as attacks need it: eval mode, frozen weights; all of it, and the global RNG, given back.

    A second thread waits until the model is back.
    """
    with ExitStack() as stack:
        stack.enter_context(exclusive(model))
        stack.enter_context(kept_global_rng(device))
        stack.enter_context(mode(model, training=False))
        stack.enter_context(kept_buffers(model))
        stack.enter_context(frozen(model))
        yield


def home(model: nn.Module) -> torch.device:
    """The device the model lives on (the CPU for a model without tensors)."""
    tensor = next(iter(model.parameters()), next(iter(model.buffers()), None))
    return torch.device("cpu") if tensor is None else tensor.device


@contextmanager
def placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Lend the model to another device and bring it home."""
    where = home(model)
    try:
        model.to(device)
        yield
    finally:
        model.to(where)
