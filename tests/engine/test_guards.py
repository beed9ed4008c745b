"""A run in progress is protected from a second process, and its data are remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatrock.core.errors import StateError
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job
from flatrock.engine.loop import train

MakeJob = Callable[..., Job]


@pytest.mark.parametrize("how", [{"resume": True}, {"overwrite": True}])
def test_two_trainers_cannot_share_a_folder(
    make_job: MakeJob, tmp_path: Path, listener: Callable[..., Any], how: dict[str, bool]
) -> None:
    """The second is refused with the first one's process number; the first goes on undisturbed."""
    refused: list[str] = []

    def intrude(step: int) -> None:
        if step == 4:
            with pytest.raises(StateError, match=r"process \d+ is training into") as caught:
                train(make_job(tmp_path / "run"), **how)
            refused.append(str(caught.value))

    run = train(make_job(tmp_path / "run"), progress=listener(intrude))
    assert len(refused) == 1
    assert (run.status, [r.epoch for r in run.records]) == ("finished", [1, 2, 3, 4])
    assert not RunFolder(tmp_path / "run").lock.exists()


def test_other_data_cannot_be_trained_on_in_the_same_run(
    make_job: MakeJob, tmp_path: Path, stopper: Callable[[int], Any]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(make_job(tmp_path / "run"), progress=stopper(5))
    other = replace(make_job(tmp_path / "run"), data_digest="other")
    with pytest.raises(StateError, match="the data are not those"):
        train(other, resume=True)
    assert train(make_job(tmp_path / "run"), resume=True).status == "finished"


def test_nothing_to_resume_leaves_no_trace(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(StateError, match=r"cannot be resumed: there is no state\.safetensors"):
        train(make_job(tmp_path), resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
