"""`flatrock reproduce`: recipes -> runs -> results -> a page beside the papers' figures."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
import typer

from flatrock.cli.console import TerminalProgress, errors, friendly, human, say, show
from flatrock.cli.evaluated import draw_plans, tell_findings
from flatrock.cli.reproduce_table import Prepared, prepare
from flatrock.cli.results import tell_changes, tell_expected
from flatrock.cli.shared import FAILED, UNFINISHED, DataDir, seeds_of
from flatrock.cli.train import tell_run
from flatrock.core.device import each_device, named_devices, pick_device
from flatrock.core.progress import clock
from flatrock.core.provenance import device_name
from flatrock.core.records import Result
from flatrock.core.rows import Row, chosen_on_test
from flatrock.core.runs import Run
from flatrock.engine.folder import UNENDED, RunFolder
from flatrock.recipes.pieces import DEFAULT_RUNS
from flatrock.reports.claims import more_differences, tally_lines
from flatrock.reports.expected import expected_line
from flatrock.reports.papers import Papers
from flatrock.reports.results import overview
from flatrock.reports.table import Table
from flatrock.workflows.cost import estimate
from flatrock.workflows.expected import expected_bands
from flatrock.workflows.reproduce import Listener, Outcome
from flatrock.workflows.reproduce_plan import NEW, Planned
from flatrock.workflows.results import changes

# An exit code beside FAILED and UNFINISHED: all rows are there, and some are not what their recipes expect.
UNEXPECTED = 4
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME|KEY=VALUE",
        help="recipes by name or file, patterns such as 'digits_*', or tables such as rat_table1; and overrides of all "
        "of them, such as train.epochs=1",
    ),
]
RunsDir = Annotated[Path, typer.Option(help="where the run folders lie")]
Out = Annotated[Path | None, typer.Option(help="results file; default reproduce.json in the folder of the runs")]
Page = Annotated[Path | None, typer.Option(help="the .md file to write; default beside the results file")]
Figures = Annotated[
    Path | None, typer.Option("--papers", help="the papers' figures; default as `flatrock report` has it")
]
Seeds = Annotated[str | None, typer.Option(help="such as 0,1,2 or 0-4: a row each, in <run folder>-seed<N>")]
Download = Annotated[bool, typer.Option("--download", help="fetch missing data")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda; all, or cuda:0,cuda:1: they share the work")]
Limit = Annotated[
    float | None, typer.Option(min=0, help="begin no training and no evaluation after so many minutes; exit code 3")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what is done and what is left; write nothing")]


def run(
    words: Words,
    runs_dir: RunsDir = DEFAULT_RUNS,
    out: Out = None,
    page: Page = None,
    papers: Figures = None,
    seeds: Seeds = None,
    data_dir: DataDir = None,
    download: Download = False,
    device: Device = "auto",
    limit_minutes: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Train, evaluate and collect recipes into a table and a page; what is done is skipped, the rest goes on."""
    with friendly("the same command goes on where this one stopped"):
        overrides = [word for word in words if re.match(r"[\w.]+=", word) and not Path(word).is_file()]
        table = prepare(
            [word for word in words if word not in overrides],
            overrides,
            runs_dir=runs_dir,
            out=out,
            page=page,
            papers=papers,
            seeds=() if seeds is None else seeds_of(seeds),
            data_dir=data_dir,
            download=download,
            device=named_devices(device),
        )
        if dry_run:
            _tell_plan(table)
            return
        with TerminalProgress() as progress:
            outcome = table.make(limit_minutes=limit_minutes, progress=progress, listener=Told(table.rows))
        _tell_outcome(table, outcome)
        if files := table.report():
            say("\n".join(f"wrote {file}" for file in (table.out, *files)))
        tell_expected(outcome.rows, outcome.bands)
        if outcome.problems or outcome.left or outcome.lacking:
            raise typer.Exit(FAILED if outcome.problems else UNFINISHED)
        if outcome.missed:
            raise typer.Exit(UNEXPECTED)


class Told(Listener):
    """Says on the console what becomes of the rows."""

    def __init__(self, rows: Sequence[Planned]) -> None:
        self._total = len(rows)
        self._waiting = sum(bool(row.left()) for row in rows)
        self._seconds: list[float] = []  # of rows that were made as a whole
        self._elsewhere: set[Path] = set()  # folders of rows that were left to other processes
        self._begun, self._worked, self._whole = 0.0, False, False

    def row(self, number: int, planned: Planned, left: Sequence[str]) -> None:
        """Which one, and how long all will take if they take as long as those made so far."""
        head, place = f"row {number}/{self._total} {planned.recipe.name}", f"  {planned.folder}"
        self._begun, self._worked, self._whole = time.monotonic(), bool(left), bool(left) and planned.status == NEW
        if not left:
            done = "made by another process meanwhile" if planned.folder in self._elsewhere else "was done before"
            say((head, "bold"), place, "" if planned.status == "failed" else f", {done}")
            return
        self._waiting += planned.folder in self._elsewhere  # it had its turn, and has come back
        seconds = self._waiting * mean(self._seconds) if self._seconds else None
        pace = "" if seconds is None else f"  (about {clock(seconds)} left if rows take as long as so far)"
        self._waiting -= 1
        say((head, "bold"), place, "" if self._whole else ", goes on", pace)

    def trained(self, planned: Planned, run: Run) -> None:
        """How it ended."""
        tell_run(planned.recipe.name, run)

    def evaluated(self, planned: Planned, result: Result, file: Path) -> None:
        """What lies beside it, and what to think of it."""
        say(f"wrote {file}")
        draw_plans(result, file)
        tell_findings(result)
        about = planned.recipe.about
        if about.expect and not about.bands and not changes(planned.recipe) and result.provenance["whole_plan"]:
            say(f"expected: {about.expect}")

    def failed(self, planned: Planned, why: str) -> None:
        """Why."""
        say(("FAILED: ", "bold red"), f"{planned.folder.name}: {why}", to=errors)
        self._whole = False

    def busy(self, planned: Planned, why: str) -> None:
        """By whom."""
        self._elsewhere.add(planned.folder)
        say(("left ", "yellow"), f"{planned.folder.name}: {why}", to=errors)

    def added(self, planned: Planned, rows: Sequence[Row]) -> None:
        """Whether the row is as expected, and the table so far."""
        made = [row for row in rows[-1:] if (row.recipe, row.seed) == (planned.recipe.name, planned.recipe.seed)]
        bands = expected_bands(made if self._worked else [], [planned.recipe])
        for row in made if bands else ():
            say(expected_line(row, bands[row.key]))
        if self._whole:
            self._seconds.append(time.monotonic() - self._begun)
        if self._worked and len(rows) < self._total and rows:
            show(overview(rows))


def _tell_outcome(table: Prepared, outcome: Outcome) -> None:
    """The whole table, what became of the papers' differences (between all rows of the file), and what is left."""
    if outcome.rows:
        show(overview(outcome.rows))
        tell_changes(outcome.rows)
    rows = table.known()
    papers = table.figures(rows)
    told = [_tell_differences(papers, rows, on_test=on_test) for on_test in (False, True)]
    if outcome.rows and not any(told):
        say("papers print no difference between two of these rows as their recipes say")
    for planned in outcome.left:
        why = outcome.busy.get(planned.folder, "no time was left")
        say(("not made ", "yellow"), f"{planned.folder.name}: {why}; the same command goes on")
    _tell_lacking(table)
    if outcome.problems:
        say(f"{len(outcome.problems)} of {len(table.rows)} rows failed", to=errors)


def _tell_differences(papers: Papers, rows: Sequence[Row], *, on_test: bool) -> bool:
    """What became of those that papers print between these rows; whether there are any."""
    way = ", chosen on the test set*" if on_test else ""
    lines = {key: tally_lines(p, papers.runs(key, rows), on_test=on_test) for key, p in papers.protocols.items()}
    for key in filter(lines.get, lines):
        say("\n".join([f"of the differences papers print, {key}{way}:", *(f"  {line}" for line in lines[key])]))
    known = {row.recipe for row in rows if (row.on_test if on_test else row.comparable)}
    for key, part in papers.protocols.items():
        if wanted := more_differences(part, known, on_test=on_test):
            say(f"{key}{way}, differences: {wanted}")
    return any(lines.values())


def _tell_lacking(table: Prepared) -> None:
    """Rows of published tables that are not made for want of a file."""
    for name, fault in table.lacking.items():
        say(("left out ", "yellow"), f"{name}: {fault}")


def _tell_plan(table: Prepared) -> None:
    """What is done, what is left, and how long training will take."""
    where = pick_device(each_device(table.device)[0])
    lines, times = [], list[float | None]()
    for row in table.rows:
        left, status = row.left(), row.status
        times.append(_estimated(row, where) if "train" in left else 0.0)
        told = "FAILED" if status == "failed" else ", ".join(left) or "done"
        lines.append((str(row.folder), status, told, f"about {human(times[-1])}" if times[-1] else ""))
    show(Table(("run", "training", "left", "time of training"), tuple(lines)))
    todo = sum(bool(row.left()) for row in table.rows)
    say(f"{len(lines)} rows, {len(lines) - todo} of them done; results in {table.out}, page {table.page}")
    _tell_lacking(table)
    for key, text in table.outlooks().items():
        say(f"{key}: {text}")
    found = [said for row in table.rows if (said := changes(row.recipe))]
    if on_test := sum(map(chosen_on_test, found)):
        say(f"{on_test} of them choose their best epoch on the test set: compared, with a *, with papers that did")
    if changed := len(found) - on_test:
        say(f"{changed} of them are changed by overrides, and compared with no paper")
    known = [seconds for seconds in times if seconds is not None]
    if sum(known):
        more = f" beside {times.count(None)} of unknown length" if None in times else ""
        say(f"about {human(sum(known))} of training{more} on {device_name(where)}, then evaluations")
        say("  (an estimate, extrapolated from the best passes of one batch of each, as if nothing else ran here:")
        say("  an order of magnitude)")


def _estimated(row: Planned, device: torch.device) -> float | None:
    """Seconds of the epochs that are not trained yet; None if only the files of the data know."""
    done = len(RunFolder(row.folder).records()) if row.status in UNENDED else 0
    seconds = estimate(row.recipe, device=device).seconds
    return None if seconds is None else seconds * max(1 - done / row.recipe.train.epochs, 0)
