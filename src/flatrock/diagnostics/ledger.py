"""Finished points of a long measurement, one sealed line each, so that a killed one goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from flatrock.core.errors import StateError
from flatrock.core.files import json_text, sealed_line, sha256, unsealed, write_atomic
from flatrock.core.identity import ANSWERS, differences
from flatrock.core.locks import locked


def begun(path: Path, identity: Mapping[str, Any]) -> bool:
    """Whether finished parts of just this measurement lie there."""
    try:
        with path.open(errors="replace") as f:
            return not differences(f.readline(), identity)
    except (OSError, ValueError, TypeError):
        return False


def forget(path: Path) -> None:
    """Remove what a repetition that was stopped has left; that of one at work is its own."""
    if path.is_file():
        with suppress(StateError, OSError), _alone(path):  # it is only in the way
            path.unlink(missing_ok=True)


@contextmanager
def measuring(path: Path, identity: Mapping[str, Any], *, resume: bool) -> Iterator[Ledger]:
    """A ledger that nobody else works on meanwhile; BusyError, which names the process at work, if one does."""
    with suppress(OSError):  # told by the lock
        path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        yield Ledger(path, identity, resume=resume)


def _alone(path: Path) -> AbstractContextManager[None]:
    return locked(path.with_name(f".{path.name}.lock"), "measuring into", path)


def is_ledger(path: Path) -> bool:
    """Whether a file begins as one of unfinished measurements does."""
    try:
        with path.open(errors="replace") as f:
            return isinstance(json.loads(f.readline()), dict)
    except (OSError, ValueError):
        return False


class Ledger:
    """Values by key in a file, for one process at a time (`measuring`); without a path nothing is kept.

    The first line says what is measured. A line that a kill left half written, or that was damaged, is measured again.
    There is no file as long as nothing is finished.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any], *, resume: bool) -> None:
        self._path = path
        # Answers are rounded, so that they may differ by a digit between two processes that measure the same.
        self._owner = sha256(json_text({k: v for k, v in identity.items() if k != ANSWERS}))
        self._known: dict[str, dict[str, Any]] = {}
        self._head = json_text(dict(identity))
        if path is None:
            return
        if resume and path.is_file():
            self._read(path, identity)
        elif path.exists() and not path.is_file():
            raise StateError(f"{path} is not a file of unfinished measurements; it is left alone")
        elif path.exists() and len(path.read_bytes().splitlines()) > 1:
            raise StateError(
                f"{path} holds finished parts of a measurement that was stopped; go on with --resume (resume=True), or "
                "delete it to start again"
            )
        self._begun = bool(self._known)
        if self._begun:  # without what was damaged
            self._write(path)

    def _write(self, path: Path) -> None:
        lines = [self._head, *(self._line(key, value) for key, value in self._known.items())]
        write_atomic(path, "".join(f"{line}\n" for line in lines).encode())

    def _read(self, path: Path, identity: Mapping[str, Any]) -> None:
        lines = path.read_text(errors="replace").splitlines()
        try:
            odd = differences(lines[0], identity)
        except (ValueError, TypeError, IndexError) as error:
            raise StateError(f"{path} is damaged; delete it to start again") from error
        if odd:
            raise StateError(
                f"{path} belongs to another measurement (different: {', '.join(odd)}); "
                "repeat its options, or delete it to start again"
            )
        for line in lines[1:]:
            try:
                value = unsealed(line, str(path), self._owner)
            except StateError:
                continue
            self._known[str(value.pop("key"))] = value

    def _line(self, key: str, value: Mapping[str, Any]) -> str:
        return sealed_line({**value, "key": key}, self._owner)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> dict[str, Any] | None:
        """What was measured under this key before."""
        return self._known.get(key)

    def __getitem__(self, key: str) -> dict[str, Any]:
        """What was measured under this key; KeyError if nothing was."""
        return self._known[key]

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Keep a value; it is on disk when this returns."""
        self._known[key] = dict(value)
        if self._path is None:
            return
        if not self._begun or not self._path.exists():  # only now: one that is refused leaves nothing behind
            self._write(self._path)
            self._begun = True
            return
        try:
            with self._path.open("a") as f:
                f.write(self._line(key, value) + "\n")
                f.flush()
                os.fsync(f.fileno())
        except OSError as error:
            raise StateError(f"could not write {self._path}: {error.strerror}; free space, then go on") from error

    def close(self) -> None:
        """Remove the file: its result is stored."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
