"""`flatrock results`: runs -> one results file."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import friendly, say, show
from flatrock.cli.shared import check_json
from flatrock.core.bands import Bands
from flatrock.core.errors import ConfigError
from flatrock.core.rows import SCHEMA, Row, add_rows, repeated, write_rows
from flatrock.recipes.expected import expected_bands
from flatrock.recipes.results import collect_run
from flatrock.reports.expected import PASS, expected_summary, expected_table, plain_lines
from flatrock.reports.remarks import told_once
from flatrock.reports.results import overview, row_names

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of evaluated runs")]
Out = Annotated[Path, typer.Option(help="the .json file to write, such as results/cifar10_short.json")]
Add = Annotated[
    bool,
    typer.Option("--add", help="keep the rows that are there; one of the same recipe, changes and seed is replaced"),
]


def run(runs: Runs, out: Out, add: Add = False) -> None:
    """Collect what runs and their evaluations say into one file, for `flatrock report`."""
    with friendly():
        check_json(out, SCHEMA, "results file")
        rows = [collect_run(path) for path in runs]
        if twice := repeated(rows):
            row = twice[0]
            told = f", changed alike ({'; '.join(row.changes)})" if row.changes else ""
            raise ConfigError(f"two runs have the same recipe and seed: {row.recipe}, {row.seed}{told}; name one")
        if add:
            rows = add_rows(out, rows)
        else:
            write_rows(out, rows)
        show(overview(rows))
        for row in rows:
            if row.main is None and row.status != "failed":
                say(("not evaluated ", "yellow"), f"{row.recipe}; run `flatrock eval` on it, then this again")
        tell_changes(rows)
        tell_expected(rows, expected_bands(rows))
        say(f"wrote {out}")


def tell_changes(rows: Sequence[Row]) -> None:
    """In what runs are not what the recipe of their name says, those alike told once."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.changes:
            said.setdefault("; ".join(row.changes), []).append(row.recipe)
    for who, text in told_once(said, [row.recipe for row in rows]):
        say(("changed ", "yellow"), f"{who}: {text}")


def tell_expected(rows: Sequence[Row], bands: Mapping[Hashable, Bands]) -> None:
    """Whether rows are what their recipes expect; nothing if nothing is expected of any."""
    if summary := expected_summary(rows, bands):
        show(expected_table(row_names(rows), rows, bands))
        verdict, _, rest = summary.partition(":")
        say((verdict, "bold green" if verdict == PASS else "bold red"), f":{rest}")
    for line in plain_lines(row_names(rows), rows):
        say(line)
