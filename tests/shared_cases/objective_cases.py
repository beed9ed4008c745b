"""Every objective with its variants, and random logits to try them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatrock.core.rng import Seed
from flatrock.core.types import View, Views

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("standard", {}),
    ("at", {}),
    ("trades", {"beta": 6.0}),
    ("trades", {"beta": 1.5}),
    ("hat", {"beta": 2.5, "gamma": 0.5, "helper": "runs/some"}),
    ("hat", {"beta": 1.5, "gamma": 0.0}),
    ("hat", {"beta": 1.5, "gamma": 0.5, "helper": "runs/some", "form": "at"}),
    ("gat", {"weight": 10.0}),
    ("mart", {"beta": 5.0}),
    ("mart", {"beta": 6.0, "form": "code"}),
    ("mart", {"beta": 5.0, "ce": "clean"}),
    ("alp", {"weight": 0.5}),
    ("alp", {"weight": 2.0, "pair": "probabilities"}),
]


def views(clean: Tensor | None, adv: Tensor | None) -> Views:
    """Passes with these logits; the helper's, of a linear network, is twice as far from the clean one."""

    def one(logits: Tensor | None) -> View | None:
        return None if logits is None else View(features=logits, logits=logits)

    if clean is None or adv is None:
        return Views(clean=one(clean), adv=one(adv))
    return Views(one(clean), one(adv), one(2 * adv - clean), helper_labels(adv))


def helper_labels(adv: Tensor) -> Tensor:
    """What some other network says."""
    return (adv.argmax(1) + 1) % adv.shape[1]


def batch(n: int = 40, classes: int = 5, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    gen = Seed(0).child("batch").generator()
    clean = scale * torch.randn(n, classes, generator=gen, dtype=torch.float64)
    adv = clean + scale * torch.randn(n, classes, generator=gen, dtype=torch.float64)
    return clean, adv, torch.randint(classes, (n,), generator=gen)
