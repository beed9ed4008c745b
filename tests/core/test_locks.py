"""Lock files: one process at a time, told who is at work; a file that was removed meanwhile locks nobody out."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from flatrock.core import locks
from flatrock.core.errors import BusyError, StateError
from flatrock.core.locks import alone, locked


def test_the_second_is_told_who_is_at_work(tmp_path: Path) -> None:
    file, place = tmp_path / ".lock", Path("runs/x")
    with locked(file, "training into", place):
        with pytest.raises(BusyError, match=rf"^process {os.getpid()} is training into runs/x; wait for it$"):
            locked(file, "evaluating", place).__enter__()
        for old, said in (("123", "process 123 is at work in runs/x"), ("", "another process is at work in runs/x")):
            file.write_text(old)
            with pytest.raises(BusyError, match=f"^{said}; wait for it$"):
                locked(file, "evaluating", place).__enter__()
    assert not file.exists()
    with locked(file, "evaluating", place):
        assert file.read_text() == f"{os.getpid()} is evaluating"


def test_a_file_that_its_holder_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before the holder removed it, locked after: another process may have made and locked a new one."""
    file, true = tmp_path / ".lock", locks.fcntl.flock
    removed: list[str] = []

    def late(handle: Any, how: int) -> None:
        if not removed:
            removed.append(file.name)
            file.unlink()
        true(handle, how)

    monkeypatch.setattr(locks.fcntl, "flock", late)
    with locked(file, "making", tmp_path):
        assert removed and file.exists(), "the one there is now"
        monkeypatch.undo()
        with pytest.raises(BusyError):
            locked(file, "making", tmp_path).__enter__()


def test_a_file_system_without_locks_is_not_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work goes on there, and says so; whatever else is wrong is told as it is."""
    code = errno.ENOLCK

    def refused(handle: Any, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(locks.fcntl, "flock", refused)
    with (
        pytest.warns(UserWarning, match=r"cannot be locked .*No locks available.*; do not begin the same work twice"),
        locked(tmp_path / ".lock", "making", tmp_path),
    ):
        assert (tmp_path / ".lock").exists()
    assert not (tmp_path / ".lock").exists()
    code = errno.EIO
    with pytest.raises(StateError, match=r"cannot be locked .*Input/output error.*another file system") as raised:
        locked(tmp_path / ".lock", "making", tmp_path).__enter__()
    assert not isinstance(raised.value, BusyError)


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"^runs/x cannot be worked in: .*; check the path and its permissions$"):
        locked(tmp_path / "gone" / ".lock", "making", Path("runs/x")).__enter__()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_with_the_place_and_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ".lock"

    def full(path: Path, place: Path, *, until: float) -> Any:
        path.touch()
        return Path("/dev/full").open("w")

    monkeypatch.setattr(locks, "_held", full)
    with pytest.raises(StateError, match=r"^runs/x cannot be worked in: .*; free space, or check the path$"):
        locked(file, "training into", Path("runs/x")).__enter__()
    assert not file.exists()


def test_an_error_inside_frees_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / ".lock", "making", tmp_path):
        raise ZeroDivisionError
    assert not (tmp_path / ".lock").exists()


def test_a_moment_is_waited_for(tmp_path: Path) -> None:
    file, order = tmp_path / ".lock", list[str]()

    def second() -> None:
        with locked(file, "adding to", tmp_path, wait=30):
            order.append("second")

    with locked(file, "adding to", tmp_path):
        thread = Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and not file.exists()


def test_one_after_the_other_writes_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, inside = tmp_path / "new" / "table.csv", list[int]()

    def write(number: int) -> None:
        with alone(file):
            inside.append(number)
            time.sleep(0.05)
            inside.append(number)

    threads = [Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inside) == 6 and inside[::2] == inside[1::2], "nobody came between"
    assert list((tmp_path / "new").iterdir()) == []
    monkeypatch.setattr(locks, "WAIT", 0.0)
    with alone(file), pytest.raises(BusyError, match=rf"is writing {file}; wait for it"):
        write(3)
