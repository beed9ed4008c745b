"""`flatrock bands`: results files -> what to expect of the next run, to be put into recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import friendly, say
from flatrock.cli.shared import recognised
from flatrock.core.bands import measured_bands
from flatrock.core.errors import StateError
from flatrock.core.rows import read_rows

Files = Annotated[
    list[Path],
    typer.Argument(metavar="RESULTS...", help="files of `flatrock results` or `reproduce`; others are left out"),
]


def run(results: Files) -> None:
    """Print the bands that follow from measured rows, for `about.bands` of their recipes; see docs/reproduce.md."""
    with friendly():
        rows = [row for _, part in recognised(results, read_rows, "flatrock results") for row in part]
        found = measured_bands(rows)
        if not found:
            raise StateError("no row there is of an unchanged recipe, finished and evaluated; make some with reproduce")
        for recipe, bands in found.items():
            seeds = sorted(row.seed for row in rows if row.comparable and row.recipe == recipe)
            told = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
            text = ", ".join(f"{name}: [{low:g}, {high:g}]" for name, (low, high) in bands.items())
            say(f"{recipe}: {{{text}}}  # {told}")
