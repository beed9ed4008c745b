"""`flatrock sweep`: a recipe with every combination of values, for every seed -> runs -> results -> one table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from flatrock.cli.console import TerminalProgress, errors, friendly, human, say, show
from flatrock.cli.reproduce import Device, Download, DryRun, Limit
from flatrock.cli.reproduce import Told as ToldOfRows
from flatrock.cli.shared import FAILED, UNFINISHED, DataDir, check_csv, check_out, seeds_of
from flatrock.core.device import Devices, each_device, named_devices, pick_device
from flatrock.core.errors import ConfigError
from flatrock.core.provenance import device_name
from flatrock.core.rows import Row
from flatrock.core.same_samples import other_samples
from flatrock.reports.differences import Difference, difference_table
from flatrock.reports.sweep import swept
from flatrock.reports.table import Table
from flatrock.workflows.reproduce_plan import Planned
from flatrock.workflows.sweep import Shard, Swept, make_sweep, seconds_left
from flatrock.workflows.sweep_plan import Plan, grid_of, plan_sweep, told

T = TypeVar("T")
Recipe = Annotated[str, typer.Argument(help="a name of `flatrock ls recipes`, or a YAML file")]
Values = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE,VALUE...",
        help="optimizer.lr=0.05,0.1 are two settings, and lists are written [50,75],[100,150]; train.epochs=3 is an "
        "override of all",
    ),
]
Seeds = Annotated[str | None, typer.Option(help="such as 0,1,2 or 0-2: a run of every setting for each")]
RunsDir = Annotated[Path | None, typer.Option(help="the folder of all runs; default runs/<recipe>-sweep")]
Part = Annotated[
    str | None, typer.Option("--shard", help="such as 2/4: the second of four jobs that make a part of the runs each")
]
Csv = Annotated[Path | None, typer.Option("--csv", help="the .csv file to write; default sweep.csv in --runs-dir")]


def run(
    recipe: Recipe,
    values: Values = None,
    seeds: Seeds = None,
    runs_dir: RunsDir = None,
    shard: Part = None,
    csv: Csv = None,
    data_dir: DataDir = None,
    download: Download = False,
    device: Device = "auto",
    limit_minutes: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Train and evaluate every combination of values for every seed; what is done is skipped, the rest goes on."""
    with friendly("the same command goes on where this one stopped"):
        faults: list[str] = []
        grid, overrides = grid_of(values or [], faults)
        numbers, part = _read(seeds_of, seeds, faults) or [], _read(Shard.of, shard, faults)
        where: dict[str, Any] = {"data_dir": data_dir, "download": download}
        plan = plan_sweep(recipe, grid, overrides, seeds=numbers, runs_dir=runs_dir, known=faults, **where)
        devices = named_devices(device)
        check_places(plan, csv, devices)
        mine = plan.runs if part is None else part.part(plan.runs)
        if dry_run:
            _tell_runs(mine)
        _tell_plan(plan, mine, devices)
        if dry_run:
            return
        where |= {"limit_minutes": limit_minutes, "device": devices}
        with TerminalProgress() as progress:
            done = make_sweep(plan, shard=part, csv=csv, progress=progress, listener=Told(mine), **where)
        _tell_outcome(plan, mine, done)
        for folder, why in done.unread.items():
            say(("left out ", "yellow"), f"{folder} of {done.csv}: {why}", to=errors)
        if done.problems or done.unread or done.left:
            raise typer.Exit(FAILED if done.problems or done.unread else UNFINISHED)


def _read(read: Callable[[str], T], text: str | None, faults: list[str]) -> T | None:
    """What an option says; what is wrong with it is told with all else that is."""
    try:
        return None if text is None else read(text)
    except ConfigError as error:
        faults.append(str(error))
        return None


class Told(ToldOfRows):
    """Says on the console what becomes of the runs; the table comes at the end, when it has means."""

    def added(self, planned: Planned, rows: Sequence[Row]) -> None:
        """How long it took."""
        if self._whole:
            self._seconds.append(time.monotonic() - self._begun)


def check_places(plan: Plan, csv: Path | None, device: Devices) -> None:
    """What cannot be written, and devices that are not there, are told before the work."""
    check_out(plan.runs_dir / "run", option="--runs-dir")
    check_csv(plan.runs_dir / "sweep.csv" if csv is None else csv)
    for one in each_device(device):
        pick_device(one)


def _tell_runs(runs: Sequence[Planned]) -> None:
    """What is done of each run, and what is left."""
    lines = []
    for one in runs:
        left, status = one.left(), one.status
        lines.append((one.folder.name, status, "FAILED" if status == "failed" else ", ".join(left) or "done"))
    show(Table(("run", "training", "left"), tuple(lines)), turn=False, cut=True)


def _tell_plan(plan: Plan, mine: Sequence[Planned], device: Devices) -> None:
    """How many runs there are, and how long they take."""
    where, whole = pick_device(each_device(device)[0]), len(plan.runs)
    seeds = whole // len(plan.settings)
    failed = sum(run.status == "failed" for run in mine)
    done = sum(not run.left() for run in mine) - failed
    part = "" if len(mine) == whole else f", {len(mine)} of them in this shard"
    say(
        f"{whole} runs in {plan.runs_dir}: {len(plan.settings)} setting{'' if len(plan.settings) == 1 else 's'} x "
        f"{seeds} seed{'' if seeds == 1 else 's'}{part}; {done} done{f', {failed} failed' if failed else ''}"
    )
    seconds, tried = seconds_left(plan, mine, where)
    if seconds is None:
        say("how long training takes cannot be told before")
    elif seconds:
        say(
            f"about {human(seconds)} of training on {device_name(where)}, then evaluations (an order of magnitude, "
            f"from passes of one batch of {tried} setting{'' if tried == 1 else 's'}, as if nothing else ran here)"
        )


def _tell_outcome(plan: Plan, mine: Sequence[Planned], done: Swept) -> None:
    """The table of all settings, and what is not there."""
    seeds = "mean ± standard deviation over seeds" if any(one.wanted > 1 for one in done.settings) else "one seed each"
    say(f"{plan.recipe}: test accuracy in percent, {seeds}; epochs chosen on held-out data (*: on the test set)")
    show(swept(done.settings), turn=False)
    _tell_differences(done.differences)
    made = ((folder.name, row) for one in done.settings for folder, row in zip(one.folders, one.rows, strict=True))
    for text in other_samples(made):
        say(("not comparable ", "yellow"), text)
    for planned in done.left:
        why = done.outcome.busy.get(planned.folder, "no time was left")
        say(("not made ", "yellow"), f"{planned.folder.name}: {why}; the same command goes on")
    if done.problems:
        names = ", ".join(folder.name for folder in done.problems)
        say(("FAILED ", "bold red"), f"{len(done.problems)} of {len(mine)} runs: {names}", to=errors)
    say(f"wrote {done.csv}")


def _tell_differences(found: Sequence[Difference]) -> None:
    """How far every setting is from the first, and what of it cannot be told."""
    if any(one.seeds for one in found):
        say(
            f"each setting minus the first ({told(found[0].base)}): points of test accuracy, paired by seed and test "
            "sample; the mean ± its standard error; ! = more than two, of few seeds by Student's t"
        )
        if any(len(one.seeds) == 1 for one in found):
            say("of a seed alone, ± is the chance of the test set, as `flatrock compare` has it, not that of seeds")
        show(difference_table(found), turn=False)
    for one in found:
        for why in dict.fromkeys(one.left_out.values()):
            seeds = ", ".join(str(seed) for seed, said in one.left_out.items() if said == why)
            say(("not compared ", "yellow"), f"{told(one.values)}, seed {seeds}: {why}")
        if one.unlike:
            say(("not compared ", "yellow"), f"{told(one.values)}, {', '.join(one.unlike)}: not asked alike")
