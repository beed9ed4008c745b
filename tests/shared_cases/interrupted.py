"""A listener that ends an evaluation as a kill would, between two batches."""

from __future__ import annotations

from flatrock.core.progress import Silent


class Killed(Exception):
    """Raised where a process would die."""


class Ends(Silent):
    """Raises after so many batches."""

    def __init__(self, after: int) -> None:
        self.left = after

    def advance(self, units: int, note: str = "") -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed
