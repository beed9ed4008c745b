"""What tests of `flatrock eval` share: the command, and the result it says it wrote."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner
from typer.testing import Result as Done

from flatrock.cli.main import app
from flatrock.core.records import Result


def flatrock(*words: str | Path) -> Done:
    return CliRunner().invoke(app, [str(w) for w in words])


def result_of(done: Done) -> Result:
    assert done.exit_code == 0, done.output
    line = next(line for line in done.output.splitlines() if line.startswith("wrote "))
    return Result.from_json(Path(line.removeprefix("wrote ")).read_text())
