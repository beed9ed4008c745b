"""Processes beside this one: how they begin, and how they end with it or before it. And how this one is asked to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread, current_thread, main_thread
from typing import Any


class Terminated(SystemExit):
    """SIGTERM, which schedulers send some time before SIGKILL. Left alone, it ends Python with exit code 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises Terminated inside, once, so that work ends as by Ctrl-C.

    Not if whoever calls listens for that signal already, nor in a thread, where Python lets nobody.
    """
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not disturb what the first began
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def begun(target: Callable[..., None], *words: Any) -> tuple[BaseProcess, Connection]:
    """A process that calls target(line, *words), and our end of the line.

    It is not forked: a process that has used a GPU cannot be. Ctrl-C is for us alone, from its first moment on.
    """
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, *words), daemon=True)
    with _without_interrupts():  # what it inherits stays with it
        process.start()
    there.close()
    return process, here


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A Ctrl-C that comes inside is heard afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # pragma: no cover (Windows)
        yield
        return
    resource_tracker.ensure_running()  # the first process would begin it, and that would let Ctrl-C through again
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def end_with_parent() -> None:
    """However the process that began this one ends: nobody is left behind that works on."""
    parent = parent_process()
    if parent is not None:
        Thread(target=_await_end, args=(parent.sentinel,), daemon=True).start()


def _await_end(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def how_it_ended(process: BaseProcess, device: object) -> str:
    """Why a process said nothing more, as far as its exit code tells; it is awaited."""
    process.join()
    code = process.exitcode
    guess = {-9: ", for want of memory?", 1: "; is the call behind `if __name__ == '__main__':`?"}.get(code or 0, "")
    return f"the process on {device} has ended (exit code {code}{guess})"
