"""Batches of an evaluation on several devices at once, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import Spec
from flatrock.core.borrow import placed
from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.core.threat import Threat
from flatrock.core.workers import Work, Workers, parcel, pickled, workers
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.fast_model import Counted
from flatrock.evaluation.journal import Chunk
from flatrock.evaluation.plans import Step, make_plan
from flatrock.evaluation.setting import at_work, choose_crafting


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a worker is told once: an exam, without what belongs to a device."""

    model: nn.Module
    surrogate: nn.Module | None
    x: Tensor
    y: Tensor
    threat: Threat
    batch_size: int
    seed: Seed
    ids: Tensor | None
    votes: int
    random: bool
    attacks: Sequence[Spec]
    classes: int
    precision: str


class Crew:
    """One worker per device. Random numbers belong to samples, so it does not matter who attacks which batch."""

    def __init__(self, at_work: Workers, exam: Exam) -> None:
        self._workers = at_work
        self._exam = exam

    @property
    def devices(self) -> int:
        """How many share the work."""
        return len(self._workers.each)

    def attempts(self, step: Step, rows: Tensor) -> Iterator[Chunk]:
        """Try one attack on these samples; the batches come in the order of the rows, as from one device.

        Where the memory of a worker does not hold one, it halves it; whatever comes later is as small for all.
        """
        exam = self._exam
        batches = ((step.label, parcel(part)) for part in torch.split(rows, exam.batch_size))
        done: dict[int, list[Chunk]] = {}
        due = 0
        for place, (chunks, size) in self._workers.answers(batches):
            exam.batch_size = min(exam.batch_size, size)
            done[place] = chunks
            while due in done:
                yield from done.pop(due)
                due += 1


@contextmanager
def crew(
    exam: Exam, devices: Sequence[torch.device], attacks: Sequence[Spec], classes: int, *, precision: str, crafted: str
) -> Iterator[Crew | None]:
    """A worker on each device, with a copy of the exam; None if there is one device only, which needs none.

    ConfigError if one of them would craft in another way than `crafted`.
    """
    if len(devices) == 1:
        yield None
        return
    orders = _pickled(exam, attacks=attacks, classes=classes, precision=precision)
    with workers(_attacking, orders, devices) as at_work:
        for worker, found in zip(at_work.each, at_work.first, strict=True):
            if found != crafted:
                raise ConfigError(
                    f"on {worker.device} attacks would craft in {found}, on {exam.device} in {crafted}; name devices "
                    "of one kind, or say precision full"
                )
        yield Crew(at_work, exam)


def _pickled(exam: Exam, **others: Any) -> bytes:
    """The orders of every worker, without tensors of a GPU."""
    for spec in others["attacks"]:
        pickled(spec, what="the attack")
    surrogate = None if exam.surrogate is None else exam.surrogate.inner
    here = torch.device("cpu")
    with placed(exam.model, here), nullcontext() if surrogate is None else placed(surrogate, here):
        orders = Orders(
            model=exam.model,
            surrogate=surrogate,
            x=parcel(exam.x),
            y=parcel(exam.y),
            threat=exam.threat,
            batch_size=exam.batch_size,
            seed=exam.seed,
            ids=None if exam.ids is None else parcel(exam.ids),
            votes=exam.votes,
            random=exam.random,
            **others,
        )
        return pickled(orders)


@contextmanager
def _attacking(orders: Orders, device: torch.device) -> Iterator[tuple[str, Work]]:
    """In a worker: what attacks craft in, and how a batch is attacked."""
    with at_work(orders.model, orders.surrogate, device) as (other, _):
        told = (orders.x, orders.y, orders.threat, device, orders.batch_size, orders.seed, other, orders.ids)
        exam = Exam(orders.model, Counted(orders.model), *told, votes=orders.votes)
        exam.random, exam.classes = orders.random, orders.classes
        crafted = choose_crafting(exam, orders.precision)[0]
        plan = make_plan(orders.attacks, classes=orders.classes, surrogate=other, threat=orders.threat)
        steps = {step.label: step for step in plan}  # made here: those that transfer hold the surrogate of here

        def attack(batch: tuple[str, Tensor], tell: Callable[[Any], None]) -> tuple[list[Chunk], int]:
            label, rows = batch
            return _chunks(exam, steps[label], rows), exam.batch_size

        yield crafted, attack


def _chunks(exam: Exam, step: Step, rows: Tensor) -> list[Chunk]:
    """One batch, or several smaller ones where the device's memory does not hold it."""
    chunks = []
    while len(rows):
        chunks.append(exam.attempt(step, rows))
        rows = rows[len(chunks[-1].rows) :]
    return chunks
