"""How long work reports itself, without knowing who listens."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol


class Progress(Protocol):
    """A listener: told what begins, how far it is, and what the current figures are."""

    def begin(self, task: str, total: int, done: int = 0) -> None:
        """A task of `total` units starts, `done` of them finished earlier."""

    def advance(self, units: int, note: str = "") -> None:
        """`units` more are done; `note` is a short line of current figures."""

    def end(self) -> None:
        """The task is over."""

    def say(self, text: str) -> None:
        """A line for the user."""


class Silent:
    """Listens and says nothing."""

    def begin(self, task: str, total: int, done: int = 0) -> None:
        """Ignore."""

    def advance(self, units: int, note: str = "") -> None:
        """Ignore."""

    def end(self) -> None:
        """Ignore."""

    def say(self, text: str) -> None:
        """Ignore."""


def clock(seconds: float) -> str:
    """75 -> '0:01:15'."""
    return str(timedelta(seconds=round(seconds))) if seconds < 1e9 else "unknown"
