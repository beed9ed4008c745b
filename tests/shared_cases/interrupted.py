"""Work that ends as a kill or Ctrl-C would end it: an evaluation between two batches, a measurement between parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flatrock.core.progress import Silent
from flatrock.diagnostics.ledger import Ledger


class Killed(Exception):
    """Raised where a process would die."""


class Ends(Silent):
    """Raises after so many batches: as a kill would end it, or as Ctrl-C does."""

    def __init__(self, after: int, how: type[BaseException] = Killed) -> None:
        self.left, self.how = after, how

    def advance(self, units: int, note: str = "") -> None:
        self.left -= 1
        if self.left == 0:
            raise self.how


@contextmanager
def stopped(after: int) -> Iterator[None]:
    """Ctrl-C when so many parts of a measurement are kept."""
    put, calls = Ledger.put, 0

    def stops(ledger: Ledger, key: str, value: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        put(ledger, key, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "put", stops)
        yield
