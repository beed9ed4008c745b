"""Parts of a measurement that are kept as they are finished, and not made again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from flatrock.core.files import json_text
from flatrock.diagnostics.ledger import Ledger

T = TypeVar("T")


class Kept:
    """The finished parts of one measurement by name; in the ledger their keys begin with `prefix`.

    `seconds` is how long the parts took that were found there. Without a ledger nothing is found.
    """

    def __init__(self, ledger: Ledger | None = None, prefix: str = "") -> None:
        self._ledger = Ledger(None, {}, resume=False) if ledger is None else ledger
        self._prefix = prefix
        self.seconds = 0.0

    def __contains__(self, name: str) -> bool:
        return self._ledger.get(self._prefix + name) is not None

    def __call__(self, name: str, make: Callable[[], T], *, write: Callable[[T], Any], read: Callable[[Any], T]) -> T:
        """The part of this name, read if it is kept, else made and written as plain values."""
        known = self._ledger.get(self._prefix + name)
        if known is not None:
            self.seconds += known["seconds"]
            return read(known["value"])
        begun = time.perf_counter()
        made = make()
        line = {"value": write(made), "seconds": time.perf_counter() - begun}
        try:
            json_text(line)
        except ValueError:  # NaN or infinity is not JSON; whoever measures says what was not finite
            return made
        self._ledger.put(self._prefix + name, line)
        return made
