"""`flatrock compare`: evaluated models -> how far they are from the first, beyond the chance of the test set or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import typer

from flatrock.cli.console import Line, friendly, say, show
from flatrock.cli.shared import no_run, without_others
from flatrock.core.errors import ConfigError
from flatrock.core.rows import WORST
from flatrock.reports.compare import accuracy_table, difference_table
from flatrock.reports.table import Table, named
from flatrock.workflows.compare import Judged, check_alike, other_options, under_one_name
from flatrock.workflows.in_common import compared

# Findings that have a mark of their own in the tables.
MARKED = ("E03", "E15")
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...", help="evaluated run folders, result-*.json files, or FILE.json[:RECIPE] of `flatrock results`"
    ),
]


Which = Annotated[
    str, typer.Option(help="of run folders: best, last, average-best, average-last; auto = best, averaged if kept")
]


def run(sources: Sources, which: Which = "auto") -> None:
    """Compare evaluated models sample by sample: the first with each of the others."""
    with friendly():
        found = compare(without_others(sources, partial(no_run, rows=True)), which)
        if found.note:
            say(found.note)
        show(found.accuracies)
        show(found.differences)
        for line in found.remarks:
            say(*line)


@dataclass(frozen=True)
class Compared:
    """Models side by side, each minus the first, and what to know of that; `note` says which results it is of."""

    note: str
    accuracies: Table
    differences: Table
    remarks: tuple[Line, ...]


def compare(sources: Sequence[str], which: str = "auto", *, called: Mapping[str, str] | None = None) -> Compared:
    """Compare what the sources say; `called` are other names for them. ConfigError or StateError if that cannot be."""
    models, note = compared(sources, which)
    if len(models) < 2:
        raise ConfigError(f"there is {len(models)} model to compare; name two or more, the one to compare with first")
    twice = sorted({m.name for m in models if [o.name for o in models].count(m.name) > 1})
    if twice:
        raise ConfigError(f"{twice[0]} is named twice; leave one out")
    check_alike(models)
    models, renamed = under_one_name([replace(m, name=(called or {}).get(m.name, m.name)) for m in models])
    rights = {named(m.name + "*" * bool(m.marks), collapsed=m.collapsed): m.right for m in models}
    odd = other_options(models)
    # What stands under every attack depends on all of them: it is as unlike as any.
    alike = len({frozenset(m.right) for m in models}) == 1 and not odd
    left_out = [*odd, *([] if alike else [WORST])]
    remarks = (*_remarks(models, renamed, odd, alike=alike),)
    return Compared(note, accuracy_table(rights), difference_table(rights, leave_out=left_out), remarks)


def _remarks(models: Sequence[Judged], renamed: Sequence[str], odd: Sequence[str], *, alike: bool) -> Iterator[Line]:
    """What a reader must know of the numbers."""
    yield (
        f"{models[0].data}; {models[0].norm} eps {models[0].eps:.4g}; points ± standard error, paired by sample; "
        "! = more than two. It knows the chance of the test set, not that of a training seed",
    )
    yield from ((line,) for line in renamed)
    for name in odd:
        yield ("not compared ", "yellow"), f"{name}: its options differ between these models"
    if not alike:
        yield ("not compared ", "yellow"), f"{WORST}: it is of other attacks, or of other options"
    for model in models:
        if model.unfinished:
            yield ("not finished ", "yellow"), f"{model.name}: evaluated when its run was at {model.unfinished}"
    for model in models:
        if found := [code for code in dict.fromkeys(model.findings) if code not in MARKED]:
            yield ("findings ", "yellow"), f"{model.name}: {', '.join(found)}; see docs/diagnostics.md"
    if any(model.collapsed for model in models):
        yield ("COLLAPSED = it gives one answer to everything (E15); differences from it say nothing",)
    if any(model.marks for model in models):
        yield ("* = the checkpoint was chosen by looking at the test set",)
