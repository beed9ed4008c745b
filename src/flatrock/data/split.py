"""The held-out part of the training data on which checkpoints are chosen: the same for everyone, every run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatrock.core.errors import DataError
from flatrock.core.files import sha256
from flatrock.core.rng import Seed
from flatrock.data.dataset import Dataset


@dataclass(frozen=True, eq=False)
class Split:
    """Training data without the held-out part, that part, and a short digest of which samples it holds."""

    train: Dataset
    held_out: Dataset
    digest: str


def held_out_split(dataset: Dataset, *, size: int, name: str | None = None) -> Split:
    """Hold out `size` samples, as equally many of each class as possible, never more than half of a class.

    The choice is a fixed permutation from Seed(0).child("held-out", name, len(dataset)), with the dataset's own name
    unless another is given; the seed of a run plays no part. The digest is the beginning of the sha256 of the sorted
    held-out ids.
    """
    shuffled = Seed(0).child("held-out", name or dataset.name, len(dataset)).permutation(len(dataset))
    labels = dataset.y.cpu()[shuffled]
    turn = _turns(labels, dataset.num_classes)
    possible = int((turn < len(dataset)).sum())
    if not 1 <= size <= possible:
        raise DataError(
            f"cannot hold out {size} of the {len(dataset)} samples of {dataset.name!r}; choose 1 to {possible} "
            "(at most half of each class)"
        )
    # Classes take turns; within a turn the shuffled order decides, which the stable sort keeps.
    chosen = shuffled[turn.argsort(stable=True)[:size]]
    is_held_out = torch.zeros(len(dataset), dtype=torch.bool)
    is_held_out[chosen] = True
    held_out = dataset.subset(is_held_out.nonzero().flatten())
    train = dataset.subset((~is_held_out).nonzero().flatten())
    return Split(train, held_out, _digest(held_out.ids))


def _turns(labels: Tensor, num_classes: int) -> Tensor:
    """For each sample, how many of its class come before it; len(labels) for the half that stays in training."""
    turn = torch.full_like(labels, len(labels))
    for c in range(num_classes):
        members = (labels == c).nonzero().flatten()
        half = len(members) // 2
        turn[members[:half]] = torch.arange(half)
    return turn


def _digest(ids: Tensor) -> str:
    return sha256(",".join(str(i) for i in sorted(ids.tolist())))[:16]
