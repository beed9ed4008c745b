"""When work is recorded, which recording serves it, and what a refusal changes; the recording itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from flatrock.models import replay as module
from flatrock.models.replay import COUNTED, OFTEN, Replay


class Pretend(Replay):
    """A replay that records by remembering the work; `log` tells what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.waits: set[str] = set()  # kinds of work that cannot be recorded

    def _rehearsed(self, kind: str, work: Callable[[], object]) -> bool:
        work()
        self.log.append(f"{kind} rehearsed")
        if kind in self.waits:
            self.refused[kind] = "it waits"
        return kind not in self.refused

    def _record(self, work: Any, x: Tensor) -> Any:
        return self._remembered("pass", work, [x])

    def _record_whole(self, work: Any, tensors: list[Tensor]) -> Any:
        return self._remembered("whole", work, tensors)

    def _remembered(self, kind: str, work: Any, inputs: list[Tensor]) -> Any:
        log = self.log

        class Recording:
            def answer(self, given: Any) -> Tensor:
                rows = [given] if isinstance(given, Tensor) else given
                for mine, tensor in zip(inputs, rows, strict=True):
                    mine[: len(tensor)] = tensor
                log.append(f"{kind} of {len(inputs[0])} replayed")
                out: Tensor = work(*inputs)
                return out[: len(rows[0])].clone()

        return Recording()


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    monkeypatch.setattr(module, "_fits", lambda x: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return Pretend()


def total(a: Tensor, b: Tensor) -> Tensor:
    return a + 2 * b


def rows(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32)[:, None] + 1


def test_a_whole_is_recorded_the_second_time_and_serves_smaller_batches(replay: Pretend) -> None:
    for count in (30, 30, 30, 20, 32):
        assert torch.equal(replay.whole("total", total, rows(count), 3 * rows(count)), 7 * rows(count))
    assert replay.log == ["whole rehearsed", *4 * ["whole of 32 replayed"]]


def test_another_name_shape_or_kind_is_another_recording(replay: Pretend) -> None:
    for _ in range(2):
        replay.whole("total", total, rows(4), rows(4))
        replay.whole("other", total, rows(4), rows(4))
        replay.whole("total", total, rows(40), rows(40))
        replay.whole("total", total, rows(4).double(), rows(4).double())
        replay.whole("total", total, rows(4), rows(4).expand(4, 2))
    assert len(replay._wholes) == 5
    assert sum("rehearsed" in line for line in replay.log) == 5


def test_passes_inside_a_whole_are_not_counted(replay: Pretend) -> None:
    def climb(x: Tensor) -> Tensor:
        for _ in range(2 * OFTEN["pass"]):
            x = replay(torch.neg, x)
        return x

    for _ in range(3):
        assert torch.equal(replay.whole("climb", climb, rows(4)), rows(4))
    assert not replay._recorded
    assert not replay._inside


def test_an_error_inside_does_not_stay_inside(replay: Pretend) -> None:
    def breaks(x: Tensor) -> Tensor:
        raise ValueError

    with pytest.raises(ValueError):
        replay.whole("breaks", breaks, rows(4))
    assert not replay._inside


def test_a_pass_is_recorded_when_it_came_often(replay: Pretend) -> None:
    for turn in range(OFTEN["pass"] + 1):
        assert torch.equal(replay(torch.neg, rows(5)), -rows(5))
        assert len(replay._recorded) == (turn + 1 >= OFTEN["pass"])
    assert replay.log == ["pass rehearsed", *2 * ["pass of 32 replayed"]]


def test_a_refusal_leaves_recordings_and_the_other_kind_alone(replay: Pretend) -> None:
    for _ in range(2):
        replay.whole("total", total, rows(4), rows(4))
    replay.waits.add("whole")
    for _ in range(5):  # rehearsed once, then never again
        assert torch.equal(replay.whole("waits", total, rows(4), rows(4)), 3 * rows(4))
    assert replay.log.count("whole rehearsed") == 2
    replay.log.clear()
    replay.whole("total", total, rows(4), rows(4))
    assert replay.log == ["whole of 32 replayed"]
    for _ in range(OFTEN["pass"]):  # inside of what is not recorded as a whole too
        replay.whole("waits", lambda x: replay(torch.neg, x), rows(5))
    assert len(replay._recorded) == 1


def test_names_that_cannot_be_kept_or_never_come_back(replay: Pretend) -> None:
    for _ in range(3):
        assert torch.equal(replay.whole(([],), total, rows(4), rows(4)), 3 * rows(4))
    for i in range(3 * COUNTED):
        replay.whole(object(), total, rows(1), rows(1))
        assert len(replay._met) <= COUNTED, i
    assert not replay._wholes
