"""What tests of commands share: the command, the file and the result it says it wrote, and what it refuses."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner
from typer.testing import Result as Done

from flatrock.cli.main import app
from flatrock.core.records import Result


def flatrock(*words: object) -> Done:
    return CliRunner().invoke(app, list(map(str, words)))


def wide(*words: object) -> Done:
    """The command where lines have room for 200 letters."""
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})


def stored(done: Done) -> Path:
    """The first file it wrote."""
    assert done.exit_code == 0, done.output
    return next(Path(line.removeprefix("wrote ")) for line in done.output.splitlines() if line.startswith("wrote "))


def read_again(done: Done) -> Path:
    """The file of finished work that it read; it wrote none."""
    assert done.exit_code == 0, done.output
    said = done.output.splitlines()
    assert not [line for line in said if line.startswith("wrote ")]
    (line,) = [line for line in said if line.startswith("read ")]
    return Path(line.removeprefix("read ").partition(", which was ")[0])


def result_of(done: Done) -> Result:
    return Result.from_json(stored(done).read_text())


def refusal(done: Done) -> str:
    """What it says instead of working, on one line."""
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return " ".join(done.output.split())
