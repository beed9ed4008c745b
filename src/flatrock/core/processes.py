"""Processes beside this one: how they begin, and how they end with it or before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any


def begun(target: Callable[..., None], *words: Any) -> tuple[BaseProcess, Connection]:
    """A process that calls target(line, *words), and our end of the line.

    It is not forked: a process that has used a GPU cannot be.
    """
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, *words), daemon=True)
    process.start()
    there.close()
    return process, here


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
    return f"the process on {device} has ended (exit code {code}){guess}"
