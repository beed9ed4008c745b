"""Who else has a GPU open: times measured beside others may not be those of what was measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType

import torch

# The server of CUDA's multi-process service works for its clients, which are listed themselves.
SERVER = "nvidia-cuda-mps-server"
# Seconds between two looks: one starts a process, which must not show in what is timed.
ASKED_EVERY = 30.0


def told(counts: Iterable[int | None]) -> str:
    """In words, the most that were seen at several times; nothing if there were none, or nobody could tell."""
    most = max((count for count in counts if count), default=0)
    if not most:
        return ""
    return f"{'another process' if most == 1 else f'up to {most} other processes'} had the same GPU open"


def neighbours(device: torch.device) -> int | None:
    """How many other processes have this GPU open right now, as `nvidia-smi` tells; None where it cannot be told."""
    name = _name(device)
    return None if name is None else _counted(name, os.getpid())


class Lookout:
    """Looks every so many seconds, in a thread, who else has a GPU open while something is timed; on a CPU never.

    `root` is the process that all of ours descend from, by default this one.
    """

    def __init__(self, device: torch.device, *, every: float = ASKED_EVERY, root: int | None = None) -> None:
        self._name = _name(device)
        self._every = every
        self._root = os.getpid() if root is None else root
        self._ended = Event()
        self._lock = Lock()
        self._most: int | None = None

    def seen(self) -> int | None:
        """The most others there were at a time since this was last asked; None if nobody has looked, or could tell."""
        with self._lock:
            most, self._most = self._most, None
        return most

    def _watch(self, name: str) -> None:
        while not self._ended.is_set():
            count = _counted(name, self._root)
            with self._lock:
                self._most = max((n for n in (count, self._most) if n is not None), default=None)
            self._ended.wait(self._every)

    def __enter__(self) -> Lookout:
        if self._name is not None:  # a daemon: nobody waits for a driver that does not answer, not even at exit
            with suppress(RuntimeError):  # no more threads are to be had: then nobody looks
                Thread(target=self._watch, args=(self._name,), name="neighbours", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()


def _name(device: torch.device) -> str | None:
    """What nvidia-smi calls a GPU, whatever CUDA_VISIBLE_DEVICES makes of its number.

    Elsewhere than on Linux it lists whoever draws on the screen, and nobody tells whose child a process is.
    """
    if device.type != "cuda" or sys.platform != "linux":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


def _counted(name: str, root: int) -> int | None:
    """Those listed, but `root`, what descends from it, and the server. A list without any of ours is in the words of
    another container; one of its lines is ours all the same. An empty one says nothing."""
    words = ["nvidia-smi", f"--id={name}", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    no = subprocess.DEVNULL
    try:
        done = subprocess.run(words, stdin=no, stdout=subprocess.PIPE, stderr=no, text=True, timeout=20, check=True)
        answer = done.stdout
        lines = [line.partition(",") for line in answer.splitlines() if line.strip()]
        listed = [int(pid) for pid, _, what in lines if not what.strip().endswith(SERVER)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    others = [pid for pid in listed if not _descends(pid, root)]
    return len(others) if len(others) < len(listed) else len(listed) - 1 if listed else None


def _descends(pid: int, root: int) -> bool:
    """Whether this is that process, or one that it began, or one of those began."""
    while pid > 0:
        if pid == root:
            return True
        try:  # the parent's number is the second word after the name, which may hold spaces, in brackets
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False
