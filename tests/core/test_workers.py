"""Tasks shared by processes: each is done once, by whoever is free, and told; failures come with their reason."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from multiprocessing import active_children
from typing import Any

import pytest
import torch
from crew_cases import CPU, counting, served

from flatrock.core.errors import ConfigError, ModelError, StateError
from flatrock.core.workers import parcel, pickled, workers


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    yield
    assert active_children() == []


def test_each_task_is_done_once_and_everything_is_heard() -> None:
    heard: list[int] = []
    with workers(counting, pickled(10), [CPU, CPU]) as at_work:
        assert at_work.first == ["here on cpu", "here on cpu"]
        found = dict(at_work.answers([3, 0, 4, 2], heard.append))
        assert found == {0: (50, 1), 1: (0, 1), 2: (140, 1), 3: (10, 1)}
        assert sorted(heard) == [0, 0, 0, 1, 1, 1, 4, 4, 9]
        assert dict(at_work.answers([1])) == {0: (0, 1)}, "again, and more of them than tasks"
        assert list(at_work.answers([])) == []


def test_answers_come_when_they_are_there_and_who_is_free_goes_on_meanwhile() -> None:
    """The slow worker has the first task only; the fast one has gone on before its answer is looked at."""
    with served((0.3, 0.0), lambda task: -task) as (made, seen):
        found = []
        for place, answer in made.answers([1, 2, 3, 4]):
            time.sleep(0.02)
            found.append((place, answer, len(seen[1])))
    assert [(place, answer) for place, answer, _ in found] == [(1, -2), (2, -3), (3, -4), (0, -1)]
    assert [after for _, _, after in found] == [2, 3, 3, 3]
    assert seen == [[1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("task", "error", "told"),
    [
        (ValueError("no such luck"), ModelError, "^on cpu: ValueError: no such luck$"),
        (EOFError("a file"), ModelError, "^on cpu: EOFError: a file$"),
        (ConfigError("say less"), ConfigError, "^say less$"),
        (
            "exit",
            StateError,
            r"^the process on cpu has ended \(exit code 3\)\. What is finished is kept; go on with --r",
        ),
    ],
)
def test_what_ends_a_worker_is_told_and_ends_the_others(task: Any, error: type[Exception], told: str) -> None:
    found = []
    with pytest.raises(error, match=told), workers(counting, pickled(1), [CPU, CPU]) as at_work:
        for _, answer in at_work.answers([2, task, 100_000_000]):
            found.append(answer)
    assert found in ([], [(1, 1)]), "what was answered before has arrived"


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the model cannot be sent to other processes \(.*name one device, or define"):
        pickled(lambda x: x)


def test_a_tensor_is_sent_by_itself() -> None:
    whole = torch.arange(1000.0)
    assert parcel(whole) is whole, "nothing to leave behind"
    for part in (whole[3:5], whole[::500], whole.view(10, 100)[:, 7]):
        sent = pickle.loads(pickle.dumps(parcel(part)))
        assert torch.equal(sent, part)
        assert sent.untyped_storage().nbytes() == 4 * len(part)
