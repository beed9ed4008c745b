"""`flatrock page`: runs and results -> one HTML file that tells all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.compare import Compared, compare
from flatrock.cli.console import Line, friendly, say
from flatrock.cli.shared import beside, check_out, no_run, without_others
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.story import Story
from flatrock.reports.page import MARK, Differences, write_page
from flatrock.workflows.story import stories

Sources = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="run folders, or result-*.json files; the first is compared with")
]
Out = Annotated[
    Path | None, typer.Option(help="the .html file to write; default: page.html in the run's folder, or the runs'")
]
Title = Annotated[str, typer.Option(help="of the page; default: the names of the models")]


def run(sources: Sources, out: Out = None, title: Title = "") -> None:
    """Tell all that is known of trained and evaluated models on one page, which stands alone: to read, keep or send."""
    with friendly():
        sources = without_others(sources, no_run)
        place = out or beside(sources, "page.html")
        _check_place(place)
        told = stories(sources)
        say(f"wrote {write_page(told, place, title=title, differences=side_by_side(sources, told))}")


def _check_place(out: Path) -> None:
    check_out(out)
    if out.suffix != ".html":
        raise ConfigError(f"out: {out} must end in .html")
    if out.exists() and MARK not in out.read_text(errors="replace")[:200]:
        raise ConfigError(f"out: {out} is no page of `flatrock page`, and is left alone; choose another name")


def side_by_side(sources: Sequence[Path], told: Sequence[Story]) -> Differences | None:
    """Models that were asked the same as the first are compared with it; of others the page says why not."""
    names = {str(source): story.name for source, story in zip(sources, told, strict=True) if story.results}
    if len(names) < 2:
        return None
    found, why = _compared(names)
    lines = [] if found is None else [found.note, *map(_plain, found.remarks)]
    table = None if found is None else found.differences
    return Differences(table, (*filter(None, lines), *why))


def _compared(names: Mapping[str, str]) -> tuple[Compared | None, list[str]]:
    """The first with all that can be compared with it, and why others cannot, those alike told once."""
    first, *others = names
    with suppress(StateError, ConfigError):  # who cannot be compared is found one by one
        return compare(list(names), called=names), []
    kept, found, why = [first], None, dict[str, list[str]]()
    for other in others:
        try:
            found = compare([*kept, other], called=names)
            kept.append(other)
        except (StateError, ConfigError) as error:
            why.setdefault(str(error), []).append(names[other])
    return found, [f"Not compared: {', '.join(who)}: {text}" for text, who in why.items()]


def _plain(line: Line) -> str:
    return "".join(part if isinstance(part, str) else part[0] for part in line)
