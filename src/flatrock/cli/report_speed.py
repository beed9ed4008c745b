"""`flatrock report-speed`: files of `flatrock bench` -> a page beside the targets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import friendly, say
from flatrock.cli.shared import check_page, recognised
from flatrock.core.costs import Bench, read_bench
from flatrock.core.errors import ConfigError
from flatrock.core.files import write_atomic
from flatrock.reports.speed import speed_page
from flatrock.reports.speed_targets import read_targets

Files = Annotated[
    list[Path], typer.Argument(metavar="BENCHES...", help="files of `flatrock bench`; others are left out")
]
Out = Annotated[Path, typer.Option(help="the .md file to write")]
Targets = Annotated[
    Path | None, typer.Option("--targets", help="what is to be reached; default: speed_targets.yaml beside the first")
]


def run(benches: Files, out: Out, targets: Targets = None) -> None:
    """Write the page of speed targets: what was to be reached, what was measured, and on what machine."""
    with friendly():
        check_page(out)
        asked = read_targets(targets or benches[0].parent / "speed_targets.yaml")
        found: dict[str, Bench] = {}
        for file, bench in recognised(benches, read_bench, "flatrock bench"):
            if file.name in found:
                raise ConfigError(f"two files are called {file.name}; leave one out or rename it")
            found[file.name] = bench
        write_atomic(out, speed_page(asked, found).encode())
        say(f"wrote {out}: {len(found)} files of measurements")
