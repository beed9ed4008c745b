"""The file of an unfinished measurement: one process at a time, and nothing of one that was refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import BusyError, ModelError, StateError
from flatrock.diagnostics.certify import certify
from flatrock.diagnostics.ledger import Ledger, begun, forget, is_ledger, measuring
from flatrock.diagnostics.smoothing import Smoothing
from flatrock.engine.folder import OWN_FILE

WORKER = """
import sys, time
from pathlib import Path
from flatrock.diagnostics.ledger import measuring
with measuring(Path(sys.argv[1]), {"a": 1}, resume=False) as ledger:
    for i in range(int(sys.argv[2])):
        ledger.put(str(i), {"value": i})
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=[0, 2])
def at_work(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str], int]]:
    """A process that measures, with so many parts finished."""
    file = tmp_path / "landscape-best-d1.part"
    words = [sys.executable, "-c", WORKER, str(file), str(request.param)]
    worker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    yield file, worker, request.param
    worker.kill()
    worker.wait()
    worker.stdout.close()


@pytest.mark.parametrize("resume", [False, True])
def test_who_is_at_work_is_told_and_after_a_kill_it_goes_on(
    at_work: tuple[Path, subprocess.Popen[str], int], resume: bool
) -> None:
    file, worker, parts = at_work
    before = file.read_bytes() if parts else b""
    told = rf"^process {worker.pid} is measuring into .*{file.name}; wait for it$"
    with pytest.raises(BusyError, match=told), measuring(file, {"a": 1}, resume=resume):
        raise AssertionError
    assert (file.read_bytes() if parts else b"") == before
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    if parts:
        with pytest.raises(StateError, match="of a measurement that was stopped; go on with --resume"):
            Ledger(file, {"a": 1}, resume=False)
    with measuring(file, {"a": 1}, resume=True) as ledger:
        assert len(ledger) == parts
        ledger.close()
    assert list(file.parent.iterdir()) == [], "the lock goes with it"


def test_there_is_no_file_before_the_first_part(tmp_path: Path) -> None:
    file, lock = tmp_path / "curvature-best-x.part", tmp_path / ".curvature-best-x.part.lock"
    with measuring(file, {"a": 1}, resume=False) as ledger:
        assert list(tmp_path.iterdir()) == [lock] and OWN_FILE.fullmatch(lock.name)
        ledger.put("one", {"value": 1})
        ledger.put("two", {"value": 2})
    assert list(tmp_path.iterdir()) == [file] and is_ledger(file)
    assert len(Ledger(file, {"a": 1}, resume=True)) == 2


def test_what_only_has_a_head_gives_way_to_another_measurement(tmp_path: Path) -> None:
    file = tmp_path / "a.part"
    file.write_text('{"a": 1}\n')
    with measuring(file, {"a": 2}, resume=False) as ledger:
        ledger.put("one", {"value": 1})
    assert len(file.read_text().splitlines()) == 2
    assert len(Ledger(file, {"a": 2}, resume=True)) == 1


class Coupled(nn.Module):
    """Its answers depend on the rest of the batch, which `certify` refuses."""

    def forward(self, x: Tensor) -> Tensor:
        z = x.flatten(1)
        return z - z.mean(0)


def test_a_model_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    x, file = torch.rand(4, 1, 2, 2), tmp_path / "a.part"
    with pytest.raises(ModelError, match="depends on the other inputs"), measuring(file, {}, resume=False) as ledger:
        certify(Coupled(), x, torch.zeros(4, dtype=torch.long), Smoothing(sigma=0.5, n0=10, n=20), ledger=ledger)
    assert list(tmp_path.iterdir()) == []


def test_that_of_one_at_work_is_not_forgotten(at_work: tuple[Path, subprocess.Popen[str], int]) -> None:
    file, worker, parts = at_work
    forget(file)
    assert file.is_file() == bool(parts)
    worker.kill()
    worker.wait()
    forget(file)
    assert not file.exists()


def test_whoever_was_refused_is_not_at_work(tmp_path: Path) -> None:
    """However long the error is kept, as a notebook does."""
    file = tmp_path / "a.part"
    with measuring(file, {"a": 1}, resume=False) as ledger:
        ledger.put("one", {"value": 1})
    with pytest.raises(StateError, match="different: a") as kept, measuring(file, {"a": 2}, resume=True):
        raise AssertionError
    with measuring(file, {"a": 1}, resume=True) as again:
        assert len(again) == 1 and kept.value


def test_who_is_at_work_in_this_process_is_left_alone_too(tmp_path: Path) -> None:
    file = tmp_path / "a.part"
    with measuring(file, {"a": 1}, resume=False) as ledger:
        ledger.put("one", {"value": 1})
        with pytest.raises(BusyError, match="is measuring into"), measuring(file, {"a": 2}, resume=True):
            raise AssertionError
        forget(file)
        assert sorted(f.name for f in tmp_path.iterdir()) == [".a.part.lock", "a.part"]
    assert [f.name for f in tmp_path.iterdir()] == ["a.part"]


def test_a_file_that_is_taken_away_is_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.part"
    with measuring(file, {"a": 1}, resume=False) as ledger:
        ledger.put("one", {"value": 1})
        file.unlink()
        ledger.put("two", {"value": 2})
    assert begun(file, {"a": 1}) and not begun(file, {"a": 2}) and not begun(tmp_path / "b.part", {"a": 1})
    assert len(Ledger(file, {"a": 1}, resume=True)) == 2
