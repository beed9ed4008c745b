"""A sweep in one call: every setting and seed is trained, evaluated and collected, resumably."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatrock.core.errors import BusyError, ConfigError, FlatrockError
from flatrock.core.files import write_csv
from flatrock.core.locks import alone
from flatrock.core.progress import Progress, Silent
from flatrock.core.rows import Row
from flatrock.engine.folder import UNENDED, RunFolder
from flatrock.recipes.schema import Recipe
from flatrock.reports.differences import Difference
from flatrock.workflows.cost import estimate
from flatrock.workflows.reproduce import Listener, Outcome, reproduce_rows
from flatrock.workflows.reproduce_plan import NEW, Planned
from flatrock.workflows.sheet import sheet
from flatrock.workflows.sweep_plan import Plan
from flatrock.workflows.sweep_settled import Settled, against_first, settled

# The time of so many settings at most is estimated, half a second each; others are taken to be like them.
ESTIMATED = 8


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What a sweep came to: its settings, whoever made their runs, and what became of the runs of this call.

    `differences` are those of every setting but the first from the first, in their order. `csv` has a line for every
    result of every run, but those `unread`, each with the reason.
    """

    settings: Sequence[Settled]
    differences: Sequence[Difference]
    outcome: Outcome
    csv: Path
    unread: Mapping[Path, str]

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of this call's runs."""
        return self.outcome.rows

    @property
    def problems(self) -> Mapping[Path, str]:
        """Why some of them have no numbers, by their folders."""
        return self.outcome.problems

    @property
    def left(self) -> Sequence[Planned]:
        """Those for which there was no time, or that other processes are making."""
        return self.outcome.left


@dataclass(frozen=True)
class Shard:
    """The part of a sweep that a job of an array makes: number `index`, from 1, of `count`."""

    index: int
    count: int

    @classmethod
    def of(cls, text: str) -> Shard:
        """`2/4`."""
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise ConfigError(f"shard must be i/n with i from 1 to n, such as 1/4 for the first of four, got {text!r}")
        return cls(int(index), int(count))

    def part(self, runs: Sequence[Planned]) -> list[Planned]:
        """Every n-th run, so that every job has some of every size."""
        return list(runs[self.index - 1 :: self.count])


def make_sweep(
    plan: Plan,
    *,
    shard: Shard | None = None,
    csv: Path | None = None,
    limit_minutes: float | None = None,
    progress: Progress | None = None,
    listener: Listener | None = None,
    **how: Any,
) -> Swept:
    """Make the runs that are missing (`how`: see reproduce_rows), then look at all there are, and write `csv`."""
    mine = plan.runs if shard is None else shard.part(plan.runs)
    outcome = reproduce_rows(mine, None, limit_minutes=limit_minutes, progress=progress, listener=listener, **how)
    target = csv or plan.runs_dir / "sweep.csv"
    unread = _write_sheet(plan, target, progress or Silent())
    found = settled(plan, outcome)
    return Swept(settings=found, differences=against_first(found), outcome=outcome, csv=target, unread=unread)


def _write_sheet(plan: Plan, target: Path, progress: Progress) -> dict[Path, str]:
    """Write a line for every result there is; the runs that cannot be read, and why."""
    try:
        with alone(target):  # processes that share a sweep often end together
            # One that another process begins right now has no recipe yet.
            known = [run.folder for run in plan.runs if run.status != NEW and RunFolder(run.folder).recipe.is_file()]
            unread: dict[Path, str] = {}
            try:
                table = sheet(known, Silent())
            except FlatrockError:
                unread = {folder: why for folder in known if (why := _unreadable(folder))}
                table = sheet([folder for folder in known if folder not in unread], Silent())
            write_csv(target, table.header, table.rows)
    except BusyError as error:  # all runs are made: that is no reason to fail
        progress.say(f"{error}; until then it may lack the last runs, and the same command writes it again")
        return {}
    return unread


def _unreadable(folder: Path) -> str:
    """Why a run, or one of its results, cannot be read: one damaged file keeps no other run out of the table."""
    try:
        sheet([folder], Silent())
    except FlatrockError as error:
        return str(error)
    return ""


def seconds_left(plan: Plan, runs: Sequence[Planned], device: torch.device) -> tuple[float | None, int]:
    """About how long training these takes, from some settings, and from how many; None if none can tell."""
    todo = {run.folder: _share_left(run) for run in runs if "train" in run.left()}
    settings = [one for one in plan.settings if any(run.folder in todo for run in one.runs)]
    step = max(1, -(-len(settings) // ESTIMATED))
    tried = settings[::step]
    times = [_estimated(one.runs[0].recipe, device) for one in tried]
    known = [seconds for seconds in times if seconds is not None]
    if settings and not known:
        return None, len(tried)
    each = {run.folder: sum(known) / len(known) for one in settings for run in one.runs}
    for one, seconds in zip(tried, times, strict=True):
        each |= {run.folder: seconds for run in one.runs if seconds is not None}
    return sum(each[folder] * share for folder, share in todo.items()), len(tried)


def _estimated(recipe: Recipe, device: torch.device) -> float | None:
    """Seconds of training; None if that cannot be told."""
    try:
        return estimate(recipe, device=device).seconds
    except Exception:  # too large for the memory, a network that fails: told when its run fails, which ends no other
        return None


def _share_left(run: Planned) -> float:
    """The share of its epochs that is to be trained."""
    done = len(RunFolder(run.folder).records()) if run.status in UNENDED else 0
    return max(1 - done / run.recipe.train.epochs, 0)
