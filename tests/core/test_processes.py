"""A process beside this one: Ctrl-C does not reach it, not even while it begins, and this one hears its own."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import active_children
from multiprocessing.connection import Connection

import pytest

from flatrock.core.processes import begun, how_it_ended


def answers(line: Connection, word: str) -> None:
    line.recv()
    line.send(word)


def test_interrupts_are_not_for_a_process_that_begins() -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    process, line = begun(answers, "here")
    assert process.pid is not None
    for _ in range(5):  # while it imports what it needs
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.05)
    line.send("go on")
    assert line.recv() == "here"
    assert how_it_ended(process, "cpu") == "the process on cpu has ended (exit code 0)"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == mask
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert active_children() == []


@pytest.mark.parametrize(
    ("how", "told"),
    [(signal.SIGKILL, "(exit code -9, for want of memory?)"), (signal.SIGTERM, "(exit code -15)")],
)
def test_how_it_ended_is_told(how: signal.Signals, told: str) -> None:
    process, _ = begun(answers, "")
    assert process.pid is not None
    os.kill(process.pid, how)
    assert how_it_ended(process, "cuda:1") == f"the process on cuda:1 has ended {told}"
