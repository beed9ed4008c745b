"""Batches of a dataset on the device; every batch is a pure function of seed, epoch and step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from flatrock.core.errors import ConfigError, DataError, StateError
from flatrock.core.rng import Seed
from flatrock.core.team import ALONE, Team
from flatrock.data.augment import Augmentation
from flatrock.data.dataset import Dataset, check, scaled
from flatrock.data.pictures import Pictures

T = TypeVar("T")


# Extra samples get ids above this, which no dataset reaches, so that they share no random numbers with its samples.
EXTRA_IDS = 1 << 40
# Batches that are augmented together on a GPU, where launching the many small kernels takes longer than they run.
AHEAD = 8
# Batches that are read from files while the network works on the one before.
READ_AHEAD = 3


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs in [0, 1], labels, and the ids their random numbers belong to; a part of a batch knows how large it is."""

    x: Tensor
    y: Tensor
    ids: Tensor
    share: float = 1.0


class TensorLoader:
    """Shuffled, augmented batches of a dataset, optionally mixed with extra data.

    With `extra`, round(batch_size * extra_fraction) samples of each batch are drawn from it with replacement and come
    last. An epoch still has as many steps as without it, as is usual for such training, so it then passes over that
    share less of the labelled data. A last batch of less than `least` samples joins the one before: BatchNorm cannot
    train on one.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: Seed,
        augmentation: Augmentation,
        device: torch.device | str,
        extra: Dataset | None = None,
        extra_fraction: float = 0.0,
        least: int = 2,
    ) -> None:
        if not 1 <= batch_size <= len(dataset):
            raise DataError(
                f"batch_size must lie in 1..{len(dataset)}, the number of samples of {dataset.name!r}, got {batch_size}"
            )
        self._extra_size = _extra_size(dataset, extra, batch_size, extra_fraction)
        self._dataset, self._device = check(dataset).to(device), torch.device(device)
        self._extra = None if extra is None else check(extra, unlabelled=True).to(device)
        self._own_size = batch_size - self._extra_size
        self._seed, self._augmentation = seed, augmentation
        full, rest = divmod(len(dataset), batch_size)
        self._merge_last = 0 < rest < least and self._extra_size == 0
        self._steps = full + (rest > 0 and not self._merge_last)

    def __len__(self) -> int:
        return self._steps

    @property
    def samples(self) -> int:
        """Samples of the dataset."""
        return len(self._dataset)

    def epoch(self, index: int, start_step: int = 0, team: Team = ALONE) -> Iterator[Batch]:
        """The batches of epoch `index`, from step `start_step` on; of each the part that belongs to this process."""
        if not 0 <= start_step <= self._steps:
            raise StateError(
                f"an epoch has {self._steps} steps, cannot start at step {start_step}; same data as before?"
            )
        return self._batches(index, start_step, team)

    def _batches(self, index: int, start_step: int, team: Team) -> Iterator[Batch]:
        order = self._seed.child("order", index).permutation(len(self._dataset)).to(self._dataset.x.device)
        ahead = AHEAD if order.is_cuda else 1
        with closing(self._kept(order, start_step, team)) as kept:
            for first in range(start_step, self._steps, ahead):
                steps = range(first, min(first + ahead, self._steps))
                found = [self._complete(next(kept), index, step, team) for step in steps]
                gen = self._seed.child("augment", index).samples(torch.cat([batch.ids for batch in found]))
                images = self._augmentation(torch.cat([batch.x for batch in found]), gen)
                for x, batch in zip(torch.split(images, [len(batch.y) for batch in found]), found, strict=True):
                    yield replace(batch, x=x)

    def _kept(self, order: Tensor, start_step: int, team: Team) -> Generator[Batch]:
        """The dataset's samples of each step, as the dataset keeps them and where; files are read ahead."""
        rows = (team.part(order[self._span(step)]) for step in range(start_step, self._steps))
        jobs = (partial(_take, self._dataset, own) for own in rows)
        if isinstance(self._dataset.x, Pictures):
            yield from in_background(jobs, ahead=READ_AHEAD)
        else:
            yield from (job() for job in jobs)

    def _span(self, step: int) -> slice:
        """Where in an epoch's order the dataset's samples of a step stand."""
        begin, last = step * self._own_size, step == self._steps - 1
        whole = len(self._dataset)
        return slice(begin, whole if last and self._merge_last else min(begin + self._own_size, whole))

    def _complete(self, kept: Batch, index: int, step: int, team: Team) -> Batch:
        """A step's samples on the device, images in [0, 1], extra ones included."""
        batch = _scaled(_moved(kept, self._device))
        if self._extra is not None:
            batch = _joined(batch, self._draw_extra(self._extra, index, step, team))
        span = self._span(step)
        return replace(batch, share=len(batch.y) / (span.stop - span.start + self._extra_size))

    def _draw_extra(self, extra: Dataset, index: int, step: int, team: Team) -> Batch:
        generator = self._seed.child("extra", index, step).generator()
        chosen = torch.randint(len(extra), (self._extra_size,), generator=generator)
        batch = _scaled(_take(extra, team.part(chosen)))
        return Batch(batch.x, batch.y, batch.ids + EXTRA_IDS)


def _extra_size(dataset: Dataset, extra: Dataset | None, batch_size: int, fraction: float) -> int:
    """Extra samples per batch, after checking that the extra data fits the dataset."""
    if extra is None:
        if fraction:
            raise ConfigError(f"extra_fraction={fraction} needs extra data; give some or set it to 0")
        return 0
    size = extra_share(batch_size, fraction)
    if extra.input_shape != dataset.input_shape or extra.num_classes != dataset.num_classes:
        raise DataError(
            f"extra data {extra.name!r} has inputs {extra.input_shape} in {extra.num_classes} classes, but "
            f"{dataset.name!r} has {dataset.input_shape} in {dataset.num_classes}; they must agree"
        )
    return size


def extra_share(batch_size: int, fraction: float) -> int:
    """Extra samples per batch; ConfigError if none of them, or of the others, is left."""
    size = round(batch_size * fraction)
    if not 1 <= size < batch_size:
        raise ConfigError(
            f"extra_fraction={fraction} of batch_size={batch_size} is {size} extra samples; "
            f"choose a fraction that leaves 1..{batch_size - 1}"
        )
    return size


def _take(dataset: Dataset, indices: Tensor) -> Batch:
    indices = indices.to(dataset.x.device, non_blocking=True)
    return Batch(dataset.pixels(indices), dataset.y[indices], dataset.ids[indices])


def _moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device. From pinned memory, which a GPU fetches while the host goes on.

    Not done by the thread that reads: while a CUDA graph is captured no other thread may ask for pinned memory.
    """
    if batch.x.device.type == device.type:
        return batch
    x, y, ids = (part.pin_memory().to(device, non_blocking=True) for part in (batch.x, batch.y, batch.ids))
    return Batch(x, y, ids)


def _scaled(batch: Batch) -> Batch:
    return replace(batch, x=scaled(batch.x))


def _joined(a: Batch, b: Batch) -> Batch:
    return Batch(torch.cat([a.x, b.x]), torch.cat([a.y, b.y]), torch.cat([a.ids, b.ids]))


def in_background(jobs: Iterable[Callable[[], T]], *, ahead: int) -> Iterator[T]:
    """What the jobs return, in their order; a thread is up to `ahead` of them further than the caller."""
    pool, waiting = ThreadPoolExecutor(1, thread_name_prefix="flatrock-reader"), deque[Future[T]]()
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
