"""Free what holds itself, soon: a GPU's memory does not wait for Python's collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected() -> Iterator[None]:
    """What becomes garbage inside is freed at the end.

    What was there before is not looked through, which in a process with a compiler takes a quarter of a second; unless
    somebody keeps objects frozen, who would lose that.
    """
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if mine:
            gc.unfreeze()
