"""`flatrock page`: runs and results -> one HTML file that tells all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.compare import compare
from flatrock.cli.console import friendly, say
from flatrock.cli.shared import beside, check_out, without_others
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
        sources = without_others(sources)
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
    """Models that were asked the same are compared; of others the page says why not."""
    if sum(bool(story.results) for story in told) < 2:
        return None
    names = {str(source): story.name for source, story in zip(sources, told, strict=True) if story.results}
    try:
        found = compare(list(names), called=names)
    except (StateError, ConfigError) as error:
        return Differences(None, (f"Not compared: {error}",))
    lines = ["".join(part if isinstance(part, str) else part[0] for part in line) for line in found.remarks]
    return Differences(found.differences, (*filter(None, [found.note]), *lines))
