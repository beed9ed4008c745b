"""What must be the same for work to go on where it stopped: exactly, but for the rounded answers of a network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flatrock.core.files import json_text

# How far clean margins may differ between two processes, on average and relative to the margins: far above rounding.
ALIKE = 0.01
ANSWERS = "clean answers"  # their name in an identity
MODEL_CODE = "model_code"  # what the user wrote of a network


def differences(stored: str, identity: Mapping[str, Any]) -> list[str]:
    """The keys in which an identity differs from one stored as JSON; ValueError or TypeError if that is none.

    Answers may differ by rounding, and are named only where nothing else is: other weights or data say more.
    """
    old, mine = json.loads(stored), json.loads(json_text(dict(identity)))
    if not isinstance(old, dict):
        raise ValueError("an identity is a JSON object")
    odd = sorted(k for k in old.keys() | mine.keys() if k not in old or k not in mine or old[k] != mine[k])
    same = len(odd) > 1 or _alike(old.get(ANSWERS), mine.get(ANSWERS))
    return [key for key in odd if key != ANSWERS or not same]


def answers(margins: Tensor) -> list[float]:
    """What tells one function from another with the same weights: the margins of clean inputs, to four digits."""
    return [float(f"{m:.4g}") for m in torch.nan_to_num(margins.double()).tolist()]


def _alike(stored: Sequence[float] | None, now: Sequence[float] | None) -> bool:
    """Whether these are answers of one function, up to rounding; None, of a network that answers at random, may be."""
    if stored is None or now is None:
        return True
    old, new = torch.tensor(stored, dtype=torch.float64), torch.tensor(now, dtype=torch.float64)
    return old.shape == new.shape and bool((old - new).abs().mean() <= ALIKE * old.abs().mean())
