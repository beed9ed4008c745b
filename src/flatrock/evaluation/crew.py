"""Batches of an evaluation on several devices at once, each in a process of its own."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, FlatrockError, ModelError, StateError, in_words
from flatrock.core.processes import begun, end_with_parent, how_it_ended
from flatrock.core.rng import Seed
from flatrock.core.threat import Threat
from flatrock.evaluation.exam import Exam, placed
from flatrock.evaluation.fast_model import Counted
from flatrock.evaluation.journal import Chunk
from flatrock.evaluation.plans import Spec, Step, make_plan
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
    threads: int


@dataclass(frozen=True)
class Worker:
    """A process that attacks on its device what it is sent."""

    device: torch.device
    process: BaseProcess
    line: Connection

    def send(self, pickled: bytes) -> None:
        """Pickled before and not by the line, so that tensors travel as they are, without shared memory."""
        with suppress(OSError):  # it is gone, which `answer` tells
            self.line.send_bytes(pickled)

    def answer(self) -> Any:
        """What it sends back; the error it met, if it met one."""
        try:
            told = pickle.loads(self.line.recv_bytes())
        except (EOFError, OSError) as error:
            raise StateError(
                f"{how_it_ended(self.process, self.device)}. What is finished is kept; go on with --resume, a smaller "
                "--batch-size or fewer devices"
            ) from error
        if isinstance(told, BaseException):
            raise told
        return told


class Crew:
    """One worker per device. Random numbers belong to samples, so it does not matter who attacks which batch."""

    def __init__(self, workers: Sequence[Worker], size: int) -> None:
        self._workers = workers
        self._size = size

    def attempts(self, step: Step, rows: Tensor) -> Iterator[Chunk]:
        """Try one attack on these samples; the batches come in the order of the rows, as from one device."""
        waiting = list(enumerate(torch.split(rows, self._size)))[::-1]
        free = list(self._workers)[::-1]
        busy: dict[int, Worker] = {}  # by the place of its batch
        done: dict[int, list[Chunk]] = {}
        due = 0
        while waiting or busy:
            while free and waiting:
                place, part = waiting.pop()
                busy[place] = free.pop()
                busy[place].send(pickle.dumps((step.label, part)))
            ready = wait([worker.line for worker in busy.values()])
            for place, worker in list(busy.items()):
                if worker.line in ready:
                    done[place] = worker.answer()
                    free.append(busy.pop(place))
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
    threads = max(1, torch.get_num_threads() // len(devices))
    orders = _pickled(exam, attacks=attacks, classes=classes, precision=precision, threads=threads)
    workers: list[Worker] = []
    try:
        for device in devices:
            workers.append(Worker(device, *begun(_serve, str(device))))
            workers[-1].send(orders)
        for worker in workers:
            found = worker.answer()
            if found != crafted:
                raise ConfigError(
                    f"on {worker.device} attacks would craft in {found}, on {exam.device} in {crafted}; name devices "
                    "of one kind, or say precision full"
                )
        yield Crew(workers, exam.batch_size)
    finally:
        for worker in workers:  # at once: a batch may take minutes, and what is finished has arrived
            worker.line.close()
            worker.process.terminate()
            worker.process.join()


def _pickled(exam: Exam, **others: Any) -> bytes:
    """The orders of every worker, without tensors of a GPU; ModelError if the network cannot travel."""
    surrogate = None if exam.surrogate is None else exam.surrogate.inner
    here = torch.device("cpu")
    with placed(exam.model, here), nullcontext() if surrogate is None else placed(surrogate, here):
        orders = Orders(
            model=exam.model,
            surrogate=surrogate,
            x=exam.x.cpu(),
            y=exam.y.cpu(),
            threat=exam.threat,
            batch_size=exam.batch_size,
            seed=exam.seed,
            ids=exam.ids,
            votes=exam.votes,
            random=exam.random,
            **others,
        )
        try:
            return pickle.dumps(orders)
        except Exception as error:
            raise ModelError(
                f"the model cannot be sent to other processes ({in_words(error)}); evaluate on one device, or define "
                "it in a module that can be imported"
            ) from error


def _serve(line: Connection, device: str) -> None:
    """The life of a worker: orders, then batches, until the line ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who gives the orders
    end_with_parent()
    try:
        orders: Orders = pickle.loads(line.recv_bytes())
        torch.set_num_threads(orders.threads)
        where = torch.device(device)
        with at_work(orders.model, orders.surrogate, where) as (other, _):
            told = (orders.x, orders.y, orders.threat, where, orders.batch_size, orders.seed, other, orders.ids)
            exam = Exam(orders.model, Counted(orders.model), *told, votes=orders.votes, random=orders.random)
            line.send_bytes(pickle.dumps(choose_crafting(exam, orders.precision)[0]))
            plan = make_plan(orders.attacks, classes=orders.classes, surrogate=other, threat=orders.threat)
            steps = {step.label: step for step in plan}  # made here: those that transfer hold the surrogate of here
            while True:
                label, rows = pickle.loads(line.recv_bytes())
                line.send_bytes(pickle.dumps(_chunks(exam, steps[label], rows)))
    except EOFError:
        return
    except Exception as error:
        # Errors of others may not be known, or not be picklable, where it is raised.
        ours = error if isinstance(error, FlatrockError) else ModelError(f"on {device}: {in_words(error)}")
        line.send_bytes(pickle.dumps(ours))


def _chunks(exam: Exam, step: Step, rows: Tensor) -> list[Chunk]:
    """One batch, or several smaller ones where the device's memory does not hold it."""
    chunks = []
    while len(rows):
        chunks.append(exam.attempt(step, rows))
        rows = rows[len(chunks[-1].rows) :]
    return chunks
