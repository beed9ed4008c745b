"""Who decides about a sample: one answer of the model, or the majority of several."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flatrock.attacks.losses import margin
from flatrock.attacks.pgd import classified_right
from flatrock.core.errors import ConfigError
from flatrock.core.numbers import plain


def check_votes(votes: int) -> int:
    """An odd number, so that one side has more than half; else ConfigError."""
    count = plain(votes)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or count % 2 == 0:
        near = f"; use {count + 1}" if isinstance(count, int) and count > 0 and count % 2 == 0 else ""
        raise ConfigError(f"votes must be an odd number >= 1, so that there is a majority, got {votes!r}{near}")
    return count


def majority(ask: Callable[[], Tensor], y: Tensor, votes: int) -> Tensor:
    """Logits by which a sample is right exactly if more than half of `votes` answers are: row by row the median one.

    The median by margin z_y - max_{k != y} z_k, wrong answers below right ones; of equal answers it is that answer.
    """
    if votes == 1:
        return ask()
    answers = torch.stack([ask() for _ in range(votes)])
    middle = torch.stack([_rank(answer, y) for answer in answers]).sort(stable=True, dim=0).indices[votes // 2]
    return answers[middle, torch.arange(len(y), device=y.device)]


def _rank(logits: Tensor, y: Tensor) -> Tensor:
    """The margin, but below 0 for every wrong answer: a tie that is lost, and one that is not finite."""
    ahead = -margin(logits, y)
    lost = torch.where(ahead < 0, ahead, -torch.finfo(ahead.dtype).tiny)
    return torch.where(classified_right(logits, y), ahead, lost)
