"""A write that fails leaves the old file; a damaged line is noticed whatever character was hit."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import string
from pathlib import Path
from typing import Any

import pytest

from flatrock.core.errors import StateError
from flatrock.core.files import json_text, sealed_line, sha256, unsealed, write_atomic

RECORD = {
    "epoch": 12,
    "lr": 0.1,
    "terms": {"ce": 1.25, "kl": 0.03125},
    "note": 'a "quoted" word, a comma',
    "clean": None,
    "list": [1, 2, 3],
    "good": True,
}


def no_space(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_write_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "result.json"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert names(path.parent) == ["result.json"]


def test_a_full_disk_leaves_the_old_file_and_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.bin"
    write_atomic(path, b"old")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StateError, match=r"could not write .*state\.bin .*No space left.*free space"):
        write_atomic(path, b"new" * 1000)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["state.bin"]


def test_a_full_disk_on_the_first_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StateError):
        write_atomic(tmp_path / "new.bin", b"new")
    assert names(tmp_path) == []


def test_a_failed_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.bin"
    write_atomic(path, b"old")

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(StateError, match="Permission denied"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["state.bin"]


def test_content_reaches_the_disk_before_the_name_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.bin"
    write_atomic(path, b"old")
    seen: list[tuple[bytes, int]] = []
    real = os.fsync

    def watch(handle: int) -> None:
        seen.append((path.read_bytes(), os.fstat(handle).st_size))
        real(handle)

    monkeypatch.setattr(os, "fsync", watch)
    write_atomic(path, b"longer")
    assert seen == [(b"old", 6)]


def test_a_file_in_the_way_of_the_folder_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    with pytest.raises(StateError, match="could not write"):
        write_atomic(tmp_path / "runs" / "state.bin", b"new")


def test_a_name_too_long_for_the_disk_is_a_state_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="could not write"):
        write_atomic(tmp_path / ("n" * 300), b"new")


def test_json_is_canonical_and_refuses_nan() -> None:
    assert json_text({"b": 1, "a": [1.5, None]}) == '{"a": [1.5, null], "b": 1}'
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            json_text({"a": bad})


def test_sha256_of_text_is_that_of_its_bytes() -> None:
    assert sha256("äb") == sha256("äb".encode()) == hashlib.sha256("äb".encode()).hexdigest()


def test_a_sealed_line_comes_back() -> None:
    line = sealed_line(RECORD)
    assert "\n" not in line
    assert unsealed(line, "log.jsonl line 1") == RECORD
    assert unsealed(line + "\n", "log.jsonl line 1") == RECORD


def test_every_single_character_corruption_is_noticed() -> None:
    """All positions, each with every printable character in turn (blanks apart, which JSON does not read)."""
    line = sealed_line(RECORD)
    printable = string.ascii_letters + string.digits + string.punctuation
    for i, was in enumerate(line):
        for character in printable:
            if character != was:
                with pytest.raises(StateError, match=r"log\.jsonl line 3 is damaged"):
                    unsealed(line[:i] + character + line[i + 1 :], "log.jsonl line 3")


def test_what_a_corruption_changes_unnoticed_is_never_the_value() -> None:
    """JSON writes some values in more than one way (\\u00fc and \\u00FC, 1e-05 and 1E-05): only that may pass."""
    record = {"name": "ümlaut", "small": 1e-05, "long": 0.1 + 0.2}
    line = sealed_line(record)
    for i in range(len(line)):
        for character in string.printable:
            try:
                value = unsealed(line[:i] + character + line[i + 1 :], "log")
            except StateError:
                continue
            assert value == record


def test_random_lost_doubled_and_swapped_characters_are_noticed() -> None:
    line = sealed_line(RECORD)
    dice = random.Random(0)
    for _ in range(500):
        i = dice.randrange(len(line) - 1)
        damaged = dice.choice(
            [line[:i] + line[i + 1 :], line[:i] + line[i] + line[i:], line[:i] + line[i + 1] + line[i] + line[i + 2 :]]
        )
        try:
            value = unsealed(damaged, "log")
        except StateError:
            continue
        assert value == RECORD, damaged


def test_every_truncation_is_noticed() -> None:
    line = sealed_line(RECORD)
    for length in range(len(line)):
        with pytest.raises(StateError, match="damaged"):
            unsealed(line[:length], "log")


@pytest.mark.parametrize("line", ["[]", "3", "null", '"text"', "{}", '{"a": 1}', '{"a": NaN, "crc": 1}'])
def test_lines_that_were_never_sealed_are_refused(line: Any) -> None:
    with pytest.raises(StateError, match=r"damaged .*--resume"):
        unsealed(line, "log")


def test_only_a_file_that_was_there_is_intact(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StateError, match=r"\(3 B\): .*continues with --resume\)$"):
        write_atomic(tmp_path / "file" / "below", b"abc")
    (tmp_path / ".kept.part").mkdir()
    (tmp_path / "kept").write_text("x")
    with pytest.raises(StateError, match=r"The previous file is intact$"):
        write_atomic(tmp_path / "kept", b"abc")
    assert (tmp_path / "kept").read_text() == "x"
