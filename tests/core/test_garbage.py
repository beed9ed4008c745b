"""Garbage made inside is freed at once; everything else stays as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from flatrock.core.garbage import collected


class Ring:
    """Holds itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def test_what_holds_itself_is_freed_and_what_was_there_before_is_not_looked_at() -> None:
    before, kept = weakref.ref(Ring()), Ring()
    with collected():
        inside = weakref.ref(Ring())
        assert inside() is not None
    assert inside() is None
    assert before() is not None
    assert kept.me is kept
    gc.collect()
    assert before() is None


def test_also_after_an_error() -> None:
    with pytest.raises(ValueError, match="no"), collected():
        inside = weakref.ref(Ring())
        raise ValueError("no")
    assert inside() is None
    assert gc.get_freeze_count() == 0


def test_what_somebody_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collected():
        inside = weakref.ref(Ring())
    assert inside() is None
    assert gc.get_freeze_count() >= frozen - 10 > 0  # frozen objects may die; they are not let go
