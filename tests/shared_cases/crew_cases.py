"""Work beside this process: networks that fail there only, what workers do, and workers that are threads."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe, parent_process
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ModelError, StateError
from flatrock.core.workers import Work, Worker, Workers

CPU = torch.device("cpu")


class Linear(nn.Module):
    """Two numbers, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 2.0], [-1.0, -1.0]]))
            self.layer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Noisy(Linear):
    """Answers at random."""

    def __init__(self, noise: float = 0.2) -> None:
        super().__init__()
        self.noise = noise
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.4 + self.noise * torch.randn_like(x))


class Failing(Linear):
    """Raises in the other process."""

    def forward(self, x: Tensor) -> Tensor:
        if parent_process() is not None:
            raise ValueError("no such luck")
        return super().forward(x)


class Cramped(Linear):
    """Has memory for two inputs at once in the other process."""

    def forward(self, x: Tensor) -> Tensor:
        if parent_process() is not None and len(x) > 2:
            raise torch.OutOfMemoryError("no room")
        return super().forward(x)


class Dying(Linear):
    """Ends the other process without a word."""

    def forward(self, x: Tensor) -> Tensor:
        if parent_process() is not None:
            os._exit(3)
        return super().forward(x)


def failures_over_there_are_told(ask: Callable[[nn.Module], object]) -> None:
    """Whatever other processes are asked to do with a network."""
    with pytest.raises(ModelError, match=r"on cpu: .*no such luck"):
        ask(Failing())
    with pytest.raises(
        StateError, match=r"the process on cpu has ended \(exit code 3\)\. What is .*go on with --resume"
    ):
        ask(Dying())
    model = Linear()
    model.forward = lambda x: 2 * model.layer(x)  # type: ignore[method-assign]
    with pytest.raises(ModelError, match=r"cannot be sent to other processes.*name one device"):
        ask(model)


def weighed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of all that is sent to workers from now on."""
    send, sizes = Worker.send, list[int]()

    def weigh(worker: Worker, words: bytes) -> None:
        sizes.append(len(words))
        send(worker, words)

    monkeypatch.setattr(Worker, "send", weigh)
    return sizes


@contextmanager
def counting(orders: int, device: torch.device) -> Iterator[tuple[str, Work]]:
    """Tells the squares of numbers below a task and answers their sum, `orders` times; a task may be a failure."""

    def work(task: Any, tell: Callable[[Any], None]) -> Any:
        if task == "exit":
            os._exit(3)
        if isinstance(task, Exception):
            raise task
        for i in range(task):
            tell(i * i)
        return orders * sum(i * i for i in range(task)), torch.get_num_threads()

    yield f"here on {device}", work


def _other_end(line: Connection, seconds: float, does: Callable[[Any], Any], seen: list[Any]) -> None:
    while True:
        try:
            task = pickle.loads(line.recv_bytes())
        except EOFError:
            return
        seen.append(task)
        time.sleep(seconds)
        line.send_bytes(pickle.dumps((True, does(task))))


@contextmanager
def served(slow: Sequence[float], does: Callable[[Any], Any]) -> Iterator[tuple[Workers, list[list[Any]]]]:
    """Workers that take so many seconds for a task, and the tasks that each of them saw."""
    seen: list[list[Any]] = [[] for _ in slow]
    lines = [Pipe() for _ in slow]
    ends = [(there, seconds, does, tasks) for (_, there), seconds, tasks in zip(lines, slow, seen, strict=True)]
    threads = [Thread(target=_other_end, args=end) for end in ends]
    for thread in threads:
        thread.start()
    try:
        yield Workers([Worker(CPU, cast(Any, None), here) for here, _ in lines]), seen
    finally:
        for here, _ in lines:
            here.close()
        for thread in threads:
            thread.join()
