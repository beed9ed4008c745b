"""`flatrock status`: where runs stand, a line for each."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from flatrock.cli.console import friendly, say, show
from flatrock.cli.shared import check_csv, without_others
from flatrock.core.files import write_csv
from flatrock.core.progress import clock
from flatrock.core.rows import WORST
from flatrock.recipes.pieces import DEFAULT_RUNS
from flatrock.reports.table import Table, percent
from flatrock.workflows.status import DAMAGED, Standing, counted, find_runs, standings

HEADER = ("run", "status", "epoch", "clean", "robust", "ETA", "evaluated", "last written")
TITLE = "clean and robust: of the best epoch (averaged: of averaged weights), on the data that choose epochs; "
TITLE += "worst case: on the test set"
COLUMNS: tuple[str, ...] = (
    "run",
    "status",
    "reason",
    "epoch",
    "epochs",
    "best_epoch",
    "averaged",
    "selected_on",
    "clean",
    "robust",
)
COLUMNS += ("eta_seconds", "results", "stale_results", "unfinished_results", "result", "attacks", "test_clean")
COLUMNS += ("worst_case", "last_written")

Places = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN_OR_FOLDER...", help="runs, or folders that are searched for runs; default runs"),
]
Csv = Annotated[Path | None, typer.Option("--csv", help="a .csv file to write, too: a line per run")]


def run(places: Places = None, csv: Csv = None) -> None:
    """Where runs stand: running, interrupted, killed, finished or failed, how far, how good, evaluated with what."""
    with friendly():
        if csv is not None:
            check_csv(csv)
        found = standings(find_runs(without_others(places or [DEFAULT_RUNS])))
        show(Table(HEADER, tuple(map(_line, found))), TITLE, turn=False, cut=True)
        for one in found:
            if one.why and one.status != "finished":
                say(
                    (f"{one.status} ", "red" if one.status in (DAMAGED, "failed") else "yellow"),
                    f"{one.folder}: {one.why}",
                )
            for file in one.stale:
                say(("stale ", "yellow"), f"{file}: of other weights than the run has now")
        say(counted(found))
        if csv is not None:
            write_csv(csv, COLUMNS, [[_cell(_values(one)[name]) for name in COLUMNS] for one in found])
            say(f"wrote {csv}")


def _line(one: Standing) -> tuple[str, ...]:
    star = "*" if one.best is not None and one.best.selected_on == "test" else ""
    shares = (percent(share) + star if share is not None else "" for share in (one.clean, one.robust))
    epoch = "" if one.status == DAMAGED and not one.epoch else f"{one.epoch}/{one.epochs or '?'}"
    epoch += ", averaged" if one.averaged else ""
    status = "FAILED" if one.status == "failed" else one.status.upper() if one.status == DAMAGED else one.status
    eta = "" if one.eta is None else clock(one.eta)
    return (str(one.folder), status, epoch, *shares, eta, _evaluated(one), _time(one.written))


def _evaluated(one: Standing) -> str:
    """Under what the run was evaluated, what stands in the worst case, and how many other results there are."""
    head, told = one.evaluated, list[str]()
    if head is not None:
        stars = f"{'*' if head.marks else ''}{' COLLAPSED' if head.collapsed else ''}"
        where = "" if head.provenance.get("whole_plan") else f" of {head.n} at eps {head.threat['eps']:.4g}"
        told.append(f"{', '.join(head.per_attack) or 'clean'}; {WORST} {percent(head.robust)}{stars}{where}")
    if others := len(one.results) - (head is not None):
        told.append(f"and {others} more" if told else f"{others} of other epochs, or stale")
    if one.part:
        told.append(f"{one.part} unfinished")
    return ", ".join(told)


def _values(one: Standing) -> dict[str, Any]:
    """The cells of a line of the CSV file."""
    best, head = one.best, one.evaluated
    return {
        "run": str(one.folder),
        "status": one.status,
        "reason": one.why,
        "epoch": one.epoch,
        "epochs": one.epochs,
        "best_epoch": best and best.epoch,
        "averaged": int(one.averaged),
        "selected_on": best and best.selected_on,
        "clean": one.clean,
        "robust": one.robust,
        "eta_seconds": None if one.eta is None else round(one.eta),
        "results": len(one.results),
        "stale_results": len(one.stale),
        "unfinished_results": one.part,
        "result": one.main,
        "attacks": head and ", ".join(head.per_attack),
        "test_clean": head and head.clean,
        "worst_case": head and head.robust,
        "last_written": datetime.fromtimestamp(one.written).astimezone().isoformat(timespec="seconds"),
    }


def _cell(value: Any) -> Any:
    return "" if value is None else value


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M") if seconds else ""
