"""A table in one call: recipe -> run -> result -> row, for every row of it, resumably."""

from __future__ import annotations

import shlex
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from flatrock.core.bands import Bands, missed
from flatrock.core.device import Devices, each_device, free_memory, pick_device
from flatrock.core.errors import BusyError, FlatrockError, StateError
from flatrock.core.files import write_atomic
from flatrock.core.progress import Progress, Silent
from flatrock.core.records import Result
from flatrock.core.rows import Row, add_rows
from flatrock.core.runs import Run
from flatrock.data.catalog import load_data
from flatrock.engine.failure import in_short, trace_of
from flatrock.engine.folder import UNENDED, RunFolder
from flatrock.evaluation.journal import discard_left_over
from flatrock.recipes.restore import stored_recipe
from flatrock.workflows.evaluate import evaluate_run, store_result
from flatrock.workflows.expected import expected_bands
from flatrock.workflows.folders import elsewhere_made, making
from flatrock.workflows.reproduce_plan import NEW, Planned
from flatrock.workflows.results import collect_run, take_attacks
from flatrock.workflows.train import train_recipe


class Listener:
    """Told what becomes of the rows, and says nothing."""

    def row(self, number: int, planned: Planned, left: Sequence[str]) -> None:
        """The row with this number, from 1, has its turn; `left` is to be done. One that was busy may have another."""

    def trained(self, planned: Planned, run: Run) -> None:
        """A run ended."""

    def evaluated(self, planned: Planned, result: Result, file: Path) -> None:
        """A checkpoint was evaluated, and its result is in the file."""

    def failed(self, planned: Planned, why: str) -> None:
        """A row has no numbers; the next one follows."""

    def busy(self, planned: Planned, why: str) -> None:
        """A row is left to another process that is making it, or one it needs; the next one follows."""

    def added(self, planned: Planned, rows: Sequence[Row]) -> None:
        """These rows are there now."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The rows in their order, why some are not what they should be, and those left for the next time.

    There was no time for those, or they are `busy`: another process is making them, at the end, too. `bands`, by the
    key of a row, are what its recipe expects. `lacking` are recipes of a published table that were left out, and what
    they would need.
    """

    rows: Sequence[Row]
    problems: Mapping[Path, str]
    left: Sequence[Planned]
    busy: Mapping[Path, str] = field(default_factory=dict)
    bands: Mapping[Hashable, Bands] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)

    @property
    def missed(self) -> list[Row]:
        """The rows that are not what their recipes expect."""
        return [row for row in self.rows if row.key in self.bands and missed(row, self.bands[row.key])]


@dataclass(frozen=True, kw_only=True)
class Means:
    """How rows are made; after `deadline` (of time.monotonic) no training and no evaluation begins."""

    data_dir: Path | None = None
    download: bool = False
    device: Devices = "auto"
    deadline: float | None = None
    progress: Progress

    @property
    def late(self) -> bool:
        """Whether there is no time left to begin anything."""
        return self.deadline is not None and time.monotonic() >= self.deadline


class _OutOfTime(Exception):
    """The deadline came between two parts of a row."""


def reproduce_rows(
    planned: Sequence[Planned],
    out: Path | None,
    *,
    data_dir: Path | None = None,
    download: bool = False,
    device: Devices = "auto",
    limit_minutes: float | None = None,
    progress: Progress | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Train, evaluate and collect every row, except for what is done; `out`, if there is one, is written after each.

    A row that fails does not end the others. Rows in `out` that are not among these are kept. Those that other
    processes were making are looked at again in the end: what is there is collected, what nobody makes now is made.
    """
    deadline = None if limit_minutes is None else time.monotonic() + 60 * limit_minutes
    means = Means(data_dir=data_dir, download=download, device=device, deadline=deadline, progress=progress or Silent())
    table = _Table(out=out, means=means, told=listener or Listener())
    left = table.turns(list(enumerate(planned, 1)))
    # Others may have ended, or been killed, since their rows were passed. A look that changes nothing is the last.
    while left and len(still := table.turns(left, again=True)) < len(left):
        left = still
    table.store()
    rows = [row for one in planned for row in table.rows.get(one.folder, ())]
    bands = expected_bands(rows, [one.recipe for one in planned])
    busy = {one.folder: table.busy[one.folder] for _, one in left if one.folder in table.busy}
    return Outcome(rows=rows, problems=table.problems, left=[one for _, one in left], busy=busy, bands=bands)


@dataclass
class _Table:
    """Rows in the making: what there is of them by now, by their folders, in the order in which it came to be."""

    _: KW_ONLY
    out: Path | None
    means: Means
    told: Listener
    rows: dict[Path, list[Row]] = field(default_factory=dict)
    problems: dict[Path, str] = field(default_factory=dict)
    busy: dict[Path, str] = field(default_factory=dict)

    def turns(self, planned: Sequence[tuple[int, Planned]], *, again: bool = False) -> list[tuple[int, Planned]]:
        """Make rows, each with its number; those that are left. What is still left `again` is not told again."""
        left: list[tuple[int, Planned]] = []
        for number, one in planned:
            elsewhere = [other for _, other in left if other.folder in self.busy]
            if again:
                self._look_again(one, elsewhere)
            todo = one.left()
            if todo and (self.means.late or one.folder in self.busy):
                left.append((number, one))
                continue
            self.told.row(number, one, todo)
            if self._made(one, todo, elsewhere):
                self.told.added(one, [row for rows in self.rows.values() for row in rows])
            else:
                left.append((number, one))
        return left

    def _look_again(self, one: Planned, elsewhere: Sequence[Planned]) -> None:
        """Whether others are making it now: who was may be done, or killed, and his lock free."""
        self.busy.pop(one.folder, None)
        if why := elsewhere_made(one.folder) or _lacks(one, elsewhere):
            self.busy[one.folder] = why

    def _made(self, one: Planned, todo: Sequence[str], elsewhere: Sequence[Planned]) -> bool:
        """Make a row; False if it is left."""
        try:
            if why := _lacks(one, elsewhere):
                raise BusyError(why)
            with making(one.folder) if todo else nullcontext():
                self.rows[one.folder] = [_row(one, self.means, self.told)]
        except (_OutOfTime, BusyError) as error:
            if isinstance(error, BusyError):
                self.busy[one.folder] = str(error)
                self.told.busy(one, str(error))
            return False
        except BrokenPipeError:  # of who listens, not of the row
            raise
        except Exception as error:  # whatever it is, of a network or a GPU: the other rows are made
            self.problems[one.folder] = _traced(one, error)
            self.told.failed(one, self.problems[one.folder])
            self.rows[one.folder] = _as_it_is(one, self.means)
        with suppress(BusyError):  # the next one adds all of them, or the last look
            self.store()
        return True

    def store(self) -> None:
        """Add all rows there are to the results file, if there is one."""
        if self.out is not None and (rows := [row for found in self.rows.values() for row in found]):
            add_rows(self.out, rows)


def _lacks(planned: Planned, elsewhere: Sequence[Planned]) -> str:
    """Which of these, that other processes make, has to be trained before this row, in words; nothing if none."""
    for other in elsewhere:
        if other.folder in planned.needs and "train" in other.left() and planned.left():
            return f"it needs {other.folder}, into which another process is training; wait for it"
    return ""


def _row(planned: Planned, means: Means, told: Listener) -> Row:
    """The row, once everything that is missing of it was made."""
    run = _run(planned, means, told)
    if run.best is None and run.best_average is None:
        raise StateError(f"{run.folder} has no best epoch: every one predicted a single class (collapsed)")
    # Further evaluations may have been made by hand: then the run only has to know that they are asked for.
    more = stored_recipe(RunFolder(run.folder), Silent()).evaluate.more
    if planned.unevaluated(run) or more != planned.recipe.evaluate.more:
        with RunFolder(run.folder).locked("evaluating"):
            take_attacks(RunFolder(run.folder), planned.recipe, means.progress)
            _evaluate(planned, run, means, told)
    row = collect_run(planned.folder, means.progress)
    for name in row.scores:  # killed after it had stored a result, an evaluation has left its batches
        for part in run.folder.glob(f"result-{name}*.part"):
            discard_left_over(part)
    return row


def _evaluate(planned: Planned, run: Run, means: Means, told: Listener) -> None:
    """Make the results that are missing."""
    for name, questions in planned.unevaluated(run).items():
        for asked in questions:
            if means.late:
                raise _OutOfTime
            if means.download:  # a run that was trained elsewhere has brought no data
                data = planned.recipe.data
                load_data(data.name, "test", folder=means.data_dir, download=True, **data.options)
            result = evaluate_run(
                run,
                which=name,
                **{"doubt": True, **asked},
                journal=True,
                resume=True,
                data_folder=means.data_dir,
                device=means.device,
                progress=means.progress,
            )
            told.evaluated(planned, result, store_result(run, result))


def _run(planned: Planned, means: Means, told: Listener) -> Run:
    """The run, from its beginning or from where it was stopped; one that failed is not tried again."""
    status, folder = planned.status, RunFolder(planned.folder)
    if status == "failed":
        why = str(folder.read_info().get("reason", "")).rstrip(".")
        cure = f"remove {planned.folder} to train it anew"
        if folder.failure.is_file() and folder.begun():  # no word of ours ended it: a device, a file, the user's code
            again = f"flatrock train {shlex.quote(str(planned.folder))} --resume"
            cure = f"go on with `{again}` if the cause is gone, or {cure}"
        raise StateError(f"{why}. It failed before and is not tried again; {cure}")
    if status not in (NEW, *UNENDED):
        return folder.run()
    for device in map(pick_device, each_device(means.device)):
        if device.type == "cuda":
            free_memory(device)  # what the row before took is not this one's peak
    # Killed before its first state was whole, a run has nothing to lose.
    stored = folder.state.exists() or folder.older_state.exists() or folder.metrics.exists()
    run = train_recipe(
        planned.recipe,
        folder=planned.folder,
        data_dir=means.data_dir,
        download=means.download,
        device=means.device,
        resume=stored,
        overwrite=not stored,
        progress=means.progress,
    )
    told.trained(planned, run)
    return run


def _traced(planned: Planned, error: Exception) -> str:
    """An error in words; where one that is not of ours came from is kept in the run folder."""
    trace, place = trace_of(error), RunFolder(planned.folder).failure
    if not trace:
        return in_short(error)
    with suppress(FlatrockError):
        write_atomic(place, trace.encode())
    return f"{in_short(error)} (where: {place})"


def _as_it_is(planned: Planned, means: Means) -> list[Row]:
    """What there is of a row that failed."""
    try:
        return [collect_run(planned.folder, means.progress)]
    except FlatrockError:  # not even that
        return []
