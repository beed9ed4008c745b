"""The held-out part of the training data on which checkpoints are chosen: the same for everyone, every run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatrock.core.errors import ConfigError, DataError
from flatrock.core.files import sha256
from flatrock.core.rng import Seed
from flatrock.data.dataset import Dataset


@dataclass(frozen=True, eq=False)
class Split:
    """Training data without the held-out part, that part, and a short digest of which samples it holds."""

    train: Dataset
    held_out: Dataset
    digest: str


def fair_subset(dataset: Dataset, size: int | None) -> Dataset:
    """At most `size` samples, as equally many of each class as possible, the same ones every time.

    The first samples of a file would do for shuffled data, but class-sorted data (a folder of images) would give one
    class only.
    """
    if size is None or size >= len(dataset):
        return dataset
    shuffled = Seed(0).child("subset", dataset.name, len(dataset)).permutation(len(dataset))
    turn = _turns(dataset.y.cpu()[shuffled], dataset.num_classes, share=1.0)
    return dataset.subset(shuffled[turn.argsort(stable=True)[:size]].sort().values)


def some_samples(dataset: Dataset, size: int | None, *, first: bool) -> Dataset:
    """A fair subset, or the `first` samples as the dataset has them: what other tools and many papers evaluate."""
    if not first:
        return fair_subset(dataset, size)
    if size is None:
        raise ConfigError("first: which samples a limit takes, but none is given; say how many, such as limit 1000")
    return dataset.subset(torch.arange(min(size, len(dataset))))


def held_out_split(dataset: Dataset, *, size: int) -> Split:
    """Hold out `size` samples, as equally many of each class as possible, never more than half of a class.

    The choice is a fixed permutation from Seed(0).child("held-out", name, len(dataset)); the seed of a run plays no
    part. The digest is the beginning of the sha256 of the sorted held-out ids.
    """
    shuffled = Seed(0).child("held-out", dataset.name, len(dataset)).permutation(len(dataset))
    labels = dataset.y.cpu()[shuffled]
    turn = _turns(labels, dataset.num_classes, share=0.5)
    possible = int((turn < len(dataset)).sum())
    if not possible:
        raise DataError(
            f"cannot hold out {size} of the {len(dataset)} samples of {dataset.name!r}: at most half of each class may "
            "be, and no class has two; add samples, or set data.held_out=0 select=test"
        )
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


def places(part: Dataset, whole: Dataset) -> Tensor:
    """Where in the whole the samples of a part stand."""
    there = {sample: place for place, sample in enumerate(whole.ids.tolist())}
    return torch.tensor([there[sample] for sample in part.ids.tolist()])


def _turns(labels: Tensor, num_classes: int, *, share: float) -> Tensor:
    """For each sample, how many of its class come before it; len(labels) beyond this share of its class."""
    turn = torch.full_like(labels, len(labels))
    for c in range(num_classes):
        members = (labels == c).nonzero().flatten()
        part = int(len(members) * share)
        turn[members[:part]] = torch.arange(part)
    return turn


def _digest(ids: Tensor) -> str:
    return sha256(",".join(str(i) for i in sorted(ids.tolist())))[:16]
