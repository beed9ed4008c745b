"""`flatrock bands`: results files -> what to expect of the next run, to be put into recipes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import friendly, say
from flatrock.cli.shared import recognised
from flatrock.core.bands import measured_bands, unfit
from flatrock.core.errors import StateError
from flatrock.core.rows import Row, read_rows

Files = Annotated[
    list[Path],
    typer.Argument(metavar="RESULTS...", help="files of `flatrock results` or `reproduce`; others are left out"),
]


def run(results: Files) -> None:
    """Print the bands that follow from measured rows, for `about.bands` of their recipes; see docs/reproduce.md."""
    with friendly():
        rows = [row for _, part in recognised(results, read_rows, "flatrock results") for row in part]
        found = measured_bands(rows)
        left = _left_out(rows)
        if not found:
            why = [f"{reason}: {names}" for reason, names in left.items()] or ["there is none"]
            head = "no band can be made of these rows; make others with `flatrock reproduce`:"
            raise StateError("\n  - ".join([head, *why]))
        for reason, names in left.items():
            say(f"left out {names}: {reason}")
        for recipe, bands in found.items():
            seeds = sorted(row.seed for row in rows if not unfit(row) and row.recipe == recipe)
            told = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
            text = ", ".join(f"{name}: [{low:g}, {high:g}]" for name, (low, high) in bands.items())
            say(f"{recipe}: {{{text}}}  # {told}")


def _left_out(rows: Sequence[Row]) -> dict[str, str]:
    """The rows of which no band is made, by the reason."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if reason := unfit(row):
            found.setdefault(reason, []).append(f"{row.recipe}, seed {row.seed}")
    return {reason: "; ".join(names) for reason, names in found.items()}
