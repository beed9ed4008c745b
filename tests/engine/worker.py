"""Trains in processes that are meant to be killed.

Reads one JSON order per line, forks a child that trains accordingly, kills it if so ordered, and writes its exit
code, or minus the signal that ended it. Forking spares every order but the first the seconds it takes to import torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flatrock.core.errors import FlatrockError
from flatrock.core.progress import Silent
from flatrock.engine.loop import train
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe

SMALL = Path(__file__).with_name("small.yaml")
REFUSED = 3


class Counter(Silent):
    """Writes the number of steps done to a file, so that others see how far this process is."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.advance(done)

    def advance(self, units: int, note: str = "") -> None:
        self.steps = getattr(self, "steps", 0) + units
        self.file.write_text(str(self.steps))


def die_at(number: int, *, moment: str) -> None:
    """Kill this process right before or right after its rename number `number` (from 1)."""
    rename, calls = Path.replace, 0

    def dying(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == number and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        moved = rename(self, target)
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return moved

    Path.replace = dying  # type: ignore[method-assign, assignment]


def obey(order: dict[str, Any]) -> int:
    job = build_job(load_recipe(SMALL, order["overrides"]), folder=Path(order["folder"]))
    # A run of a few steps may well predict a single class; that is not the subject here.
    job = replace(job, probe=lambda model, probe=job.probe: replace(probe(model), collapsed=False))
    if "die_at" in order:
        die_at(order["die_at"], moment=order["moment"])
    try:
        train(job, resume=order["resume"], overwrite=order["overwrite"], progress=Counter(Path(order["counter"])))
    except FlatrockError as error:
        Path(order["answer"]).write_text(str(error))
        return REFUSED
    return 0


def kill_after(pid: int, *, steps: int, seconds: float, counter: Path) -> int:
    """Kill the child `seconds` after its counter shows `steps`, unless it ends before; its wait status."""
    deadline = None
    while True:
        # Only a child that was not waited for yet is ever sent a signal: its number cannot have been given away.
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if deadline is None and counter.exists() and int(counter.read_text() or -1) >= steps:
            deadline = time.monotonic() + seconds
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        time.sleep(0.0005)


def main() -> None:
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # what a killed process wrote is safe; only power cuts lose it
    build_job(load_recipe(SMALL))  # imports what the children will need
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = obey(order)
            finally:
                os._exit(code)
        if "kill_after" in order:
            status = kill_after(pid, **order["kill_after"], counter=Path(order["counter"]))
        else:
            status = os.waitpid(pid, 0)[1]
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
