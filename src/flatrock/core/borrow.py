"""Borrow something of the user's model and give it back exactly, even on error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.rng import kept_global_rng


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put the model in train or eval mode; afterwards every module has its own mode back.

    Modes are saved per module, so a BatchNorm the user froze stays frozen.
    """
    saved = [(m, m.training) for m in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, was in saved:
            module.training = was


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Undo whatever happens to buffers inside (BatchNorm statistics, counters)."""
    saved = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in saved:
                buffer.copy_(value)
                setattr(module, name, buffer)  # a module may have put another tensor in its place


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
    saved = {name: parameters[name].detach().clone() for name in shift}
    try:
        with torch.no_grad():
            for name, delta in shift.items():
                parameters[name].add_(delta)
        yield
        if keep_change:
            with torch.no_grad():
                saved = {n: w + (parameters[n] - (w + shift[n])) for n, w in saved.items()}
    finally:
        with torch.no_grad():
            for name, value in saved.items():
                parameters[name].copy_(value)


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
    """The model as attacks need it: eval mode, frozen weights; all of it, and the global RNG, given back."""
    with ExitStack() as stack:
        stack.enter_context(kept_global_rng(device))
        stack.enter_context(mode(model, training=False))
        stack.enter_context(kept_buffers(model))
        stack.enter_context(frozen(model))
        yield
