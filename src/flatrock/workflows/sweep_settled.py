"""What there is of the settings of a sweep, made by this process or by others, and how far each is from the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatrock.core.errors import FlatrockError
from flatrock.core.progress import Silent
from flatrock.core.records import read_result
from flatrock.core.rows import WORST, Row
from flatrock.engine.folder import UNENDED
from flatrock.reports.differences import Difference, gaps_of
from flatrock.workflows.compare import Judged, judged_result, other_options, other_question
from flatrock.workflows.reproduce import Outcome
from flatrock.workflows.reproduce_plan import NEW, Planned
from flatrock.workflows.results import collect_run
from flatrock.workflows.sweep_plan import Plan


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What there is of a setting: rows of the runs that were evaluated and their `folders`, folders of those that
    failed, and how many runs it has in all; the others are not made yet."""

    values: Mapping[str, str]
    rows: tuple[Row, ...]
    folders: tuple[Path, ...]
    failed: tuple[Path, ...]
    wanted: int


def settled(plan: Plan, outcome: Outcome) -> list[Settled]:
    """What there is of every setting."""
    found = []
    for setting in plan.settings:
        rows = {run.folder: _row(run, outcome) for run in setting.runs}
        good = {folder: row for folder, row in rows.items() if row is not None and row.main is not None}
        failed = tuple(
            folder
            for folder, row in rows.items()
            if folder in outcome.problems or (row is not None and row.status == "failed")
        )
        found.append(
            Settled(
                values=setting.values,
                rows=tuple(good.values()),
                folders=tuple(good),
                failed=failed,
                wanted=len(setting.runs),
            )
        )
    return found


def _row(run: Planned, outcome: Outcome) -> Row | None:
    """The row of a run that has ended, if it has been evaluated as its recipe says; None of others."""
    if run.folder in outcome.problems:
        return None
    try:
        return None if run.status in (NEW, *UNENDED) else collect_run(run.folder, Silent())
    except FlatrockError:  # another process is at it: a result of older weights, half a file
        return None


@dataclass(frozen=True)
class _Run:
    """A run that may be compared: what was asked of it; or why it may not."""

    row: Row
    model: Judged | None
    why: str = ""


def against_first(settings: Sequence[Settled]) -> list[Difference]:
    """Every setting minus the first, paired by the seeds both have.

    Runs that give one answer to everything, or are known by plain weights in the place of averaged ones, are left out,
    and so are those that were not asked the same: at another radius, of other samples.
    """
    if len(settings) < 2:
        return []
    base, *others = [{row.seed: _run(row, folder) for row, folder in _runs(one)} for one in settings]
    return [_minus(one, runs, settings[0], base) for one, runs in zip(settings[1:], others, strict=True)]


def _runs(one: Settled) -> list[tuple[Row, Path]]:
    return list(zip(one.rows, one.folders, strict=True))


def _run(row: Row, folder: Path) -> _Run:
    if not row.sound:
        return _Run(row, None, "COLLAPSED" if row.collapsed else "not averaged: its averages collapsed")
    try:
        return _Run(row, judged_result(read_result(folder / f"result-{row.main}.json"), folder.name))
    except FlatrockError as error:  # another process has begun to evaluate it anew
        return _Run(row, None, str(error))


def _minus(one: Settled, runs: Mapping[int, _Run], base: Settled, bases: Mapping[int, _Run]) -> Difference:
    pairs: dict[int, tuple[Row, Row]] = {}
    models: list[Judged] = []
    left_out: dict[int, str] = {}
    for seed in sorted(runs.keys() & bases.keys()):
        here, there = runs[seed], bases[seed]
        if why := _unpaired(here, there, models):
            left_out[seed] = why
            continue
        pairs[seed] = here.row, there.row
        models += [model for model in (there.model, here.model) if model is not None]
    odd = other_options(models) if models else []
    if len({frozenset(model.right) for model in models}) > 1 or odd:  # it depends on all of them
        odd = [*odd, WORST]
    gaps, by_seed = gaps_of(list(pairs.values()), odd)
    return Difference(
        values=one.values,
        base=base.values,
        wanted=min(one.wanted, base.wanted),
        seeds=tuple(pairs),
        gaps=gaps,
        by_seed=by_seed,
        starred=any(model.marks for model in models),
        left_out=left_out,
        unlike=tuple(odd),
    )


def _unpaired(here: _Run, there: _Run, others: Sequence[Judged]) -> str:
    """Why two runs of a seed are not compared, or not with those of other seeds; nothing if they are."""
    if here.model is None or there.model is None:
        return here.why or f"the first setting is {there.why}"
    models = [*others[:1], there.model, here.model]
    if len({bool(model.marks) for model in models}) > 1:
        return "one has its epoch chosen on the test set, the other on held-out data"
    return next(filter(None, (other_question(models[0], model) for model in models[1:])), "")
