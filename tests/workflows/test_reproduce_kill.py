"""A table that is killed again and again ends in the same rows as one that never was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import table_cases
from table_cases import lasting

WORKER = Path(__file__).with_name("table_worker.py")


def made(out: Path, *renames: int) -> list[int]:
    """How the processes ended that made the table one after the other."""
    path = os.pathsep.join([str(Path(table_cases.__file__).parent), *sys.path])
    words = [sys.executable, str(WORKER), str(out), *map(str, renames)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "rows.json"
    assert made(out, 0) == [0]
    assert [set(row["scores"]) for row in lasting(out)] == [{"best"}, {"best"}]
    return out


# A row of this size takes about 70 renames: 1 is the first file of a run, 65 its end, 71 its result, 72 the table.
@pytest.mark.parametrize("renames", [(1, 1, 2, 30, 7), (64, 1, 4, 3, 3), (71, 1, 1, 2, 3), (73, 2, 3, 60, 9, 3)])
def test_killed_and_made_again(whole: Path, tmp_path: Path, renames: tuple[int, ...]) -> None:
    out = tmp_path / "rows.json"
    codes = made(out, *renames, 0)
    assert codes[-1] == 0
    assert codes.count(-9) >= 3, "most were killed"
    assert lasting(out) == lasting(whole)
    assert not list(tmp_path.rglob("*.part")), "nothing is left of what was stopped"
