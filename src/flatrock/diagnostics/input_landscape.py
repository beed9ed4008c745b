"""The input landscape: the loss of one image over the plane of its sign gradient and random signs."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.attacks.craft import check_model, check_samples
from flatrock.attacks.losses import margin
from flatrock.attacks.pgd import classified_right
from flatrock.core.borrow import borrowed, full_precision
from flatrock.core.progress import Progress
from flatrock.core.rng import SampleGen
from flatrock.core.threat import rows
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.probe import fitting


def sign_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """sign(d CE(z(x), y) / dx), sample by sample; 0 where a pixel does not matter."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        loss = F.cross_entropy(model(x), y, reduction="sum")
        (grad,) = torch.autograd.grad(loss, x)
    return grad.sign()


def random_signs(like: Tensor, gen: SampleGen) -> Tensor:
    """+1 or -1 with equal chances for every pixel (Rademacher)."""
    return torch.where(gen.uniform(like) < 0.5, -1.0, 1.0).to(like.dtype)


def walk_inputs(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    axis: Axis,
    *,
    gen: SampleGen,
    batch_size: int,
    ledger: Ledger,
    progress: Progress,
) -> None:
    """Fill the ledger, row by row, with z(a, b) = CE(z(x + a sign(grad) + b R), y), margin and whether it is right.

    R are random signs. Eval mode; points outside [0, 1] are not clipped, so that the surface has no edges of its own.
    """
    check_samples(x, y)
    check_model(model, x)
    with borrowed(model, x.device), full_precision(x.device):
        steep, chance = sign_gradient(model, x, y), random_signs(x, gen)
        b = torch.tensor(axis.values, dtype=x.dtype, device=x.device)
        for k in range(len(x)):
            across = rows(b, x) * chance[k]
            for i, a in enumerate(axis.values):
                if ledger.get(f"{k}/{i}") is None:
                    line = x[k] + a * steep[k] + across
                    row, batch_size = fitting(partial(_row, model, line, y[k]), batch_size)
                    ledger.put(f"{k}/{i}", row)
                    progress.advance(1, f"image {k + 1}/{len(x)}")


def _row(model: nn.Module, line: Tensor, y: Tensor, batch_size: int) -> dict[str, list[float | None]]:
    """Of each input: loss, whether the answer is right, and the true logit minus the largest other one."""
    found: dict[str, list[Tensor]] = {"loss": [], "accuracy": [], "margin": []}
    with torch.no_grad():
        for start in range(0, len(line), batch_size):
            part = line[start : start + batch_size]
            labels = y.expand(len(part))
            logits = model(part)
            found["loss"].append(F.cross_entropy(logits, labels, reduction="none"))
            found["accuracy"].append(classified_right(logits, labels))
            found["margin"].append(-margin(logits, labels))
    return {name: _plain(torch.cat(parts)) for name, parts in found.items()}


def _plain(values: Tensor) -> list[float | None]:
    """Numbers for JSON, which has no NaN and no infinity: None in their place."""
    return [value if math.isfinite(value) else None for value in values.double().tolist()]
