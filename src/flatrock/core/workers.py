"""Work on several devices at once, each in a process of its own that has a copy of what it needs."""

from __future__ import annotations

import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import FlatrockError, ModelError, StateError, in_words
from flatrock.core.processes import begun, end_with_parent, how_it_ended

# Does a task and answers it; what it tells meanwhile is heard at once.
Work = Callable[[Any, Callable[[Any], None]], Any]
# Of what a worker is told once, on its device: its first word, and how it does a task. Defined in a module.
Begin = Callable[[Any, torch.device], AbstractContextManager[tuple[Any, Work]]]


@dataclass(frozen=True)
class Worker:
    """A process that does on its device what it is sent."""

    device: torch.device
    process: BaseProcess
    line: Connection

    def send(self, pickled: bytes) -> None:
        """Pickled before and not by the line, so that tensors travel as they are, without shared memory."""
        with suppress(OSError):  # it is gone, which `told` tells
            self.line.send_bytes(pickled)

    def told(self) -> tuple[bool, Any]:
        """Whether it is done, and its answer or what it tells meanwhile; the error it met, if it met one."""
        try:
            done, content = pickle.loads(self.line.recv_bytes())
        except (EOFError, OSError) as error:
            raise StateError(
                f"{how_it_ended(self.process, self.device)}. What is finished is kept; go on with --resume, a smaller "
                "--batch-size or fewer devices"
            ) from error
        if isinstance(content, BaseException):
            raise content
        return done, content


@dataclass(frozen=True)
class Workers:
    """One per device, and the first word of each."""

    each: Sequence[Worker]
    first: Sequence[Any] = ()

    def answers(self, tasks: Iterable[Any], heard: Callable[[Any], None] = lambda _: None) -> Iterator[tuple[int, Any]]:
        """Whoever is free takes the next task: the place of a task and its answer, as they come."""
        waiting = iter(enumerate(tasks))
        busy: dict[Connection, tuple[int, Worker]] = {}

        def begin(worker: Worker) -> None:
            task = next(waiting, None)
            if task is not None:
                busy[worker.line] = task[0], worker
                worker.send(pickle.dumps(task[1]))

        for worker in self.each:
            begin(worker)
        while busy:
            for line in [line for line in wait(list(busy)) if isinstance(line, Connection)]:
                place, worker = busy[line]
                done, content = worker.told()
                if not done:
                    heard(content)
                    continue
                del busy[line]
                begin(worker)  # at once: whoever looks at the answer may take a while
                yield place, content


@contextmanager
def workers(begin: Begin, orders: bytes, devices: Sequence[torch.device]) -> Iterator[Workers]:
    """A process on each device that begins with these orders; all have ended afterwards, whatever they were doing."""
    threads = max(1, torch.get_num_threads() // len(devices))
    made: list[Worker] = []
    try:
        for device in devices:
            made.append(Worker(device, *begun(_serve, begin, str(device), threads)))
        for worker in made:  # when all have begun: what is large waits until it is read
            worker.send(orders)
        yield Workers(made, [worker.told()[1] for worker in made])
    finally:
        for worker in made:  # at once: a task may take minutes, and what is finished has arrived
            worker.line.close()
            worker.process.terminate()
            worker.process.join()


def parcel(tensor: Tensor) -> Tensor:
    """A tensor as it is sent: on the CPU and by itself, for pickled a view has all with it that it is a view of."""
    here = tensor.cpu()
    return here.clone() if here.untyped_storage().nbytes() > here.numel() * here.element_size() else here


def pickled(orders: Any, *, what: str = "the model") -> bytes:
    """What all workers are told, with a network and without tensors of a GPU; ModelError if that cannot travel."""
    try:
        return pickle.dumps(orders)
    except Exception as error:
        raise ModelError(
            f"{what} cannot be sent to other processes ({in_words(error)}); name one device, or define {what} in "
            "a module that can be imported"
        ) from error


def _serve(line: Connection, begin: Begin, device: str, threads: int) -> None:
    """The life of a worker: orders, then tasks, until the line ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who gives the orders
    end_with_parent()
    torch.set_num_threads(threads)
    sent = _sent(line)
    try:
        words = next(sent, None)
        if words is None:
            return
        with begin(_orders(words), torch.device(device)) as (first, work):
            _tell(line, first, done=True)
            for task in sent:
                _tell(line, work(pickle.loads(task), partial(_tell, line)), done=True)
    except Exception as error:
        # Errors of others may not be known, or not be picklable, where it is raised.
        ours = error if isinstance(error, FlatrockError) else ModelError(f"on {device}: {in_words(error)}")
        with suppress(OSError):  # nobody may listen any more
            _tell(line, ours, done=True)


def _sent(line: Connection) -> Iterator[bytes]:
    while True:
        try:
            words = line.recv_bytes()
        except EOFError:
            return
        yield words


def _orders(words: bytes) -> Any:
    """A network may be of a module in the current folder, which is no place of Python's for the command `flatrock`."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return pickle.loads(words)
    finally:
        sys.path.remove(here)


def _tell(line: Connection, content: Any, *, done: bool = False) -> None:
    line.send_bytes(pickle.dumps((done, content)))
