"""Work that one process at a time may do."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from flatrock.core.errors import BusyError, StateError

try:
    import fcntl
except ImportError:  # pragma: no cover (Windows)
    fcntl = None  # type: ignore[assignment]

# Of file systems that do not know locks, such as some network drives: work goes on, as it does on systems without.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)

# Seconds until one who waits looks again, and how long everybody does: who asks `is_held` holds it for an instant.
AGAIN, INSTANT = 0.02, 0.1
# Seconds one waits for another who writes the same file, which takes one at most; a page with pictures, a few.
WAIT = 60.0


@contextmanager
def locked(path: Path, doing: str, place: Path, *, wait: float = INSTANT) -> Iterator[None]:
    """Hold a lock file, in which others read what this process is `doing` at a place; BusyError if another holds it.

    Work that takes a moment is worth to `wait` for, so many seconds. The lock ends with the process, however it ends.
    """
    if fcntl is None:  # a system without advisory locks
        yield
        return
    with _held(path, place, until=time.monotonic() + wait) as handle:
        try:
            _say(handle, f"{os.getpid()} is {doing}", place)
            yield
        finally:
            path.unlink(missing_ok=True)


def _say(handle: IO[str], text: str, place: Path) -> None:
    try:
        handle.truncate(0)
        handle.write(text)
        handle.flush()
    except OSError as error:
        with suppress(OSError):  # what could not be written is written again when it is closed
            handle.close()
        raise StateError(f"{place} cannot be worked in: {error}; free space, or check the path") from error


@contextmanager
def alone(path: Path, doing: str = "writing") -> Iterator[None]:
    """Write a file that several processes may write, one after the other; BusyError if one of them takes long."""
    with suppress(OSError):  # told by the lock
        path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock"), doing, path, wait=WAIT):
        yield


def is_held(path: Path) -> bool | None:
    """Whether a process holds this lock file; None where that cannot be told, because there are no locks.

    One left behind by a process that was killed is held by nobody.
    """
    if fcntl is None:  # a system without advisory locks
        return None
    try:
        with path.open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        return True if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return False


def _held(path: Path, place: Path, *, until: float) -> IO[str]:
    """The file, locked. One that its last holder has removed meanwhile locks nobody out: then the new one is taken."""
    while True:
        try:
            handle = path.open("a+")
        except OSError as error:
            raise StateError(f"{place} cannot be worked in: {error}; check the path and its permissions") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                warnings.warn(f"{path} cannot be locked ({error}); do not begin the same work twice", stacklevel=4)
                return handle
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                handle.close()
                raise StateError(
                    f"{path} cannot be locked ({error}); choose a folder on another file system"
                ) from error
            if time.monotonic() < until:
                handle.close()
                time.sleep(AGAIN)
                continue
            handle.seek(0)
            who, _, doing = handle.read().partition(" is ")
            handle.close()
            who = f"process {who}" if who else "another process"
            raise BusyError(f"{who} is {doing or 'at work in'} {place}; wait for it") from error
        if _is_there(handle, path):
            return handle
        handle.close()


def _is_there(handle: IO[str], path: Path) -> bool:
    """Whether this open file still has its name."""
    try:
        return path.stat().st_ino == os.fstat(handle.fileno()).st_ino
    except FileNotFoundError:
        return False
