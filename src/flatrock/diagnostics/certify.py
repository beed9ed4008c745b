"""CERTIFY for any network and its inputs: vote on every sample, keep what is finished, put it together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.craft import answered, check_ids, check_inputs, check_model
from flatrock.core.borrow import borrowed, full_precision
from flatrock.core.errors import ConfigError, ThreatError
from flatrock.core.progress import Progress, Silent
from flatrock.core.rng import Seed
from flatrock.core.threat import L2
from flatrock.diagnostics.certificate import Certificate
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.smoothing import Smoothing, Voter

# Noisy copies that pass the network together unless told otherwise; halved when memory does not hold them.
CPU_BATCH, GPU_BATCH = 256, 8192


def certify(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    smoothing: Smoothing,
    *,
    ids: Tensor | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    ledger: Ledger | None = None,
    progress: Progress | None = None,
    marks: tuple[str, ...] = (),
    provenance: Mapping[str, Any] | None = None,
) -> Certificate:
    """Certify any module that maps [0, 1] inputs to logits, smoothed with noise on those inputs.

    Eval mode, float32 without TF32, on the device the model is on; the model is given back untouched. Random numbers
    belong to the samples' ids (their positions, unless given): neither batch size nor interruption changes them. What
    the `ledger` holds is not computed again.
    """
    x = _checked(model, x, y)
    ids = torch.arange(len(x)) if ids is None else check_ids(ids, len(x))
    where = _home(model)
    voter = Voter(model, smoothing.sigma, _size(batch_size, where))
    kept = Ledger(None, {}, resume=False) if ledger is None else ledger  # an empty one is false
    with borrowed(model, where), full_precision(where):
        with torch.no_grad():
            answered(model, x[:2].to(where), y[:2])
        found = _vote(voter, x.to(where), ids, smoothing, seed, kept, progress)
    return Certificate(
        smoothing=smoothing,
        labels=y.cpu(),
        top=torch.tensor([row["top"] for row in found]),
        counts=torch.tensor([row["counts"] for row in found]),
        ids=ids,
        shape=tuple(x.shape[1:]),
        seconds=torch.tensor([row["seconds"] for row in found], dtype=torch.float64),
        marks=marks,
        provenance={**(provenance or {}), "batch_size": voter.batch_size},
    )


def _vote(
    voter: Voter,
    x: Tensor,
    ids: Tensor,
    smoothing: Smoothing,
    seed: int,
    ledger: Ledger,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """For every sample the class that n0 votes chose and n fresh votes by class."""
    listener, node = progress or Silent(), Seed(seed).child("certify")
    draws = smoothing.n0 + smoothing.n
    known = sum(ledger.get(str(i)) is not None for i in ids.tolist())
    listener.begin("certifying", draws * len(x), draws * known)
    found = []
    for i, name in enumerate(ids.tolist()):
        row = ledger.get(str(name))
        if row is None:
            told = partial(listener.advance, note=f"sample {i + 1} of {len(x)}")
            begun = time.perf_counter()
            chosen = int(voter.votes(x[i], smoothing.n0, node.child("choose", name), told).argmax())
            counts = voter.votes(x[i], smoothing.n, node.child("count", name), told)
            row = {"top": chosen, "counts": counts.tolist(), "seconds": round(time.perf_counter() - begun, 6)}
            ledger.put(str(name), row)
        found.append(row)
    listener.end()
    return found


def _size(batch_size: int | None, device: torch.device) -> int:
    if batch_size is None:
        return GPU_BATCH if device.type == "cuda" else CPU_BATCH
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size!r}")
    return batch_size


def _checked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The inputs; refuse what cannot be certified before any vote."""
    x = check_inputs(x, y, L2(0.0))
    if x.shape[0] == 0:
        raise ThreatError("there is nothing to certify: x has no samples")
    check_model(model, x)
    return x


def _home(model: nn.Module) -> torch.device:
    tensor = next(iter(model.parameters()), next(iter(model.buffers()), None))
    return torch.device("cpu") if tensor is None else tensor.device
