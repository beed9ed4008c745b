"""`flatrock results`: runs -> one results file, or a table of all their results."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import TerminalProgress, friendly, say, show
from flatrock.cli.shared import check_csv, check_json, other_kind, without_others
from flatrock.core.bands import Bands
from flatrock.core.errors import ConfigError
from flatrock.core.files import write_csv
from flatrock.core.progress import Progress, Silent
from flatrock.core.rows import SCHEMA, Row, add_rows, repeated, write_rows
from flatrock.core.same_samples import other_samples
from flatrock.engine.folder import RunFolder
from flatrock.recipes.further import measures_of
from flatrock.recipes.restore import eval_command, stored_recipe
from flatrock.reports.expected import PASS, expected_summary, expected_table, plain_lines
from flatrock.reports.names import NOWHERE, method_names, row_names
from flatrock.reports.remarks import ON_TEST, told_once
from flatrock.reports.results import overview
from flatrock.workflows.expected import expected_bands
from flatrock.workflows.results import collect_run, further_left, is_evaluated
from flatrock.workflows.sheet import Sheet, sheet

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="folders of evaluated runs; for --csv alone result-*.json files, too"),
]
Out = Annotated[Path | None, typer.Option(help="the .json file to write, such as results/cifar10_short.json")]
Add = Annotated[
    bool,
    typer.Option("--add", help="keep the rows that are there; one of the same recipe, changes and seed is replaced"),
]
Csv = Annotated[
    Path | None,
    typer.Option(
        "--csv", help="a .csv file to write: one line per result of any kind (--limit, --eps, --attacks), too"
    ),
]


def run(runs: Runs, out: Out = None, add: Add = False, csv: Csv = None) -> None:
    """Collect what runs and their evaluations say into one file, for `flatrock report`, or as a table (--csv)."""
    with friendly():
        runs = without_others(runs, _other)
        _check(runs, out, csv, add=add)
        table = None if csv is None else sheet(runs, TerminalProgress())
        if out is not None:
            # What is odd of a recipe is said once.
            _collect(runs, out, TerminalProgress() if table is None else Silent(), add=add)
        if csv is not None and table is not None:
            _write_sheet(table, csv, bare=out is None)


def _other(path: Path) -> str:
    """Why this is neither a run nor a result; nothing if it may be one. What is not there at all is refused later."""
    if path.is_dir():
        return "" if (path / "run.json").is_file() else "no run folder, it has no run.json"
    return "no result file" if path.is_file() and path.suffix != ".json" else other_kind(path)


def _check(runs: Sequence[Path], out: Path | None, csv: Path | None, *, add: bool) -> None:
    """What cannot be written is refused before anything is."""
    if out is None and csv is None:
        raise ConfigError("nowhere to write to; give --out FILE.json (for `flatrock report`), --csv FILE.csv, or both")
    if csv is not None:
        check_csv(csv)
    if out is None and add:
        raise ConfigError("--add is about the rows of --out, which is not given; a --csv file is written anew")
    if out is not None:
        check_json(out, SCHEMA, "results file")
        if files := [str(path) for path in runs if path.is_file()]:
            raise ConfigError(
                f"{files[0]} is a file, and rows of --out are of runs; name its folder, or leave out --out"
            )


def _collect(runs: Sequence[Path], out: Path, progress: Progress, *, add: bool) -> None:
    """One row per run into the results file, and what they say."""
    rows = [collect_run(path, progress) for path in runs]
    folders: dict[Hashable, str] = {row.key: str(path) for row, path in zip(rows, runs, strict=True)}
    if twice := repeated(rows):
        row = twice[0]
        told = f", changed alike ({'; '.join(row.changes)})" if row.changes else ""
        alike = " and ".join(str(path) for path, other in zip(runs, rows, strict=True) if other.key == row.key)
        raise ConfigError(f"two runs have the same recipe and seed: {alike}, {row.recipe}, {row.seed}{told}; name one")
    if add:
        rows = add_rows(out, rows)
    else:
        write_rows(out, rows)
    show(overview(rows, folders))
    for row in rows:
        if row.main is None and row.status != "failed":
            _tell_bare(folders.get(row.key), row.recipe)
    for folder in runs:
        _tell_left(folder)
    tell_changes(rows)
    tell_expected(rows, expected_bands(rows), folders)
    say(f"wrote {out}")


def _tell_bare(folder: str | None, recipe: str = "") -> None:
    """A run without a result; nobody knows where that of an older row lies."""
    if folder is None:
        say(("not evaluated ", "yellow"), f"{recipe}; run `flatrock eval` on it, then this again")
    elif told := RunFolder(Path(folder)).to_be_ended():
        say(("not finished ", "yellow"), f"{folder} {told}")
    elif command := eval_command(RunFolder(Path(folder)).run()):
        say(("not evaluated ", "yellow"), f"{folder}; run `{command}`, then this again")
    else:
        say(("not evaluated ", "yellow"), f"{folder}: no best epoch, every epoch predicted one class (collapsed)")


def _tell_left(folder: Path) -> None:
    """What further evaluations of an evaluated run are missing."""
    run, recipe = RunFolder(folder).run(), stored_recipe(RunFolder(folder), Silent())
    main = "best" if run.best_average is None else "average-best"
    if recipe.evaluate.more and run.status != "failed" and is_evaluated(run, main, recipe):
        left = [name for asked in further_left(run, main, recipe) for name in measures_of(asked, recipe.threat)]
        again = eval_command(run, "--resume")
        if left:
            say(("not evaluated ", "yellow"), f"{folder}: {', '.join(left)}; run `{again}`, then this again")


def _write_sheet(table: Sheet, csv: Path, *, bare: bool) -> None:
    for folder, status in table.bare if bare else ():
        if status != "failed":
            _tell_bare(str(folder))
    for file in table.stale:
        say(
            ("stale ", "yellow"),
            f"{file}: of other weights than the run has now; evaluate again, or leave out its line",
        )
    for file, other in table.again:
        who = "another result of its run" if file.parent == other.parent else f"{other}, of the same recipe and seed,"
        say(("left out ", "yellow"), f"{file}: {who} answers the very same question")
    write_csv(csv, table.header, table.rows)
    results = len(table.rows) - len(table.bare)
    without = f", and {len(table.bare)} without one (a run each)" if table.bare else ""
    say(f"wrote {csv}: {results} lines with a result{without}")


def tell_changes(rows: Sequence[Row]) -> None:
    """In what runs are not what the recipe of their name says, those alike told once; which are of other samples."""
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.changes and not row.on_test:
            said.setdefault("; ".join(row.changes), []).append(row.recipe)
    everyone = [row.recipe for row in rows]
    for who, text in told_once(said, everyone):
        say(("changed ", "yellow"), f"{who}: {text}")
    for who, text in told_once(
        {ON_TEST: on_test} if (on_test := [r.recipe for r in rows if r.on_test]) else {}, everyone
    ):
        say(("test-selected ", "yellow"), f"{who}: {text}; compared, with a *, with papers that chose so")
    names = zip(method_names(rows, {}), rows, strict=True)
    for text in other_samples((f"{name} (seed {row.seed})", row) for name, row in names):
        say(("not comparable ", "yellow"), text)


def tell_expected(
    rows: Sequence[Row], bands: Mapping[Hashable, Bands], folders: Mapping[Hashable, str] = NOWHERE
) -> None:
    """Whether rows are what their recipes expect; nothing if nothing is expected of any."""
    names = row_names(rows, folders)
    if summary := expected_summary(rows, bands):
        show(expected_table(names, rows, bands))
        verdict, _, rest = summary.partition(":")
        say((verdict, "bold green" if verdict == PASS else "bold red"), f":{rest}")
    for line in plain_lines(names, rows):
        say(line)
