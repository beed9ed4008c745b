"""`flatrock report`: results files -> a page beside the papers' figures."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import friendly, say
from flatrock.cli.shared import check_page, recognised
from flatrock.core.errors import ConfigError
from flatrock.core.rows import read_rows, repeated
from flatrock.reports.notes import read_notes
from flatrock.reports.papers import known_papers
from flatrock.reports.results_files import write_results

Files = Annotated[
    list[Path], typer.Argument(metavar="RESULTS...", help="files of `flatrock results`; others are left out")
]
Out = Annotated[Path, typer.Option(help="the .md file to write")]
Figures = Annotated[
    Path | None,
    typer.Option(
        "--papers", help="the papers' figures; default: papers.yaml beside the first file, else flatrock's own"
    ),
]


def run(results: Files, out: Out, papers: Figures = None) -> None:
    """Write the page of results: one table per protocol beside the papers' figures, and what became of their claims."""
    with friendly():
        check_page(out, out.with_suffix(".png"))
        found = recognised(results, read_rows, "flatrock results")
        rows = [row for _, part in found for row in part]
        known = known_papers(papers, results[0].parent, {row.recipe: row.protocol for row in rows})
        twice = repeated(rows)
        if twice:
            raise ConfigError(f"{twice[0].recipe} with seed {twice[0].seed} is in the files twice; leave one out")
        files = [file for file, _ in found]
        pictures = write_results(rows, known, files, out, command=_command(results, out, papers))
        say(f"wrote {out}: {len(rows)} runs")
        for name in sorted(read_notes(files).keys() - {row.recipe for row in rows}):
            say(("left out ", "yellow"), f"the note on {name}: there is no such row")
        for picture in pictures:
            say(f"drew {picture}")


def _command(results: Sequence[Path], out: Path, papers: Path | None) -> str:
    """This command as it was given; of all the JSON files of a folder, as a shell abbreviates them."""
    folder = results[0].parent
    every = len(results) > 1 and set(results) == set(folder.glob("*.json"))
    words = [*([] if every else map(str, results)), "--out", str(out), *(["--papers", str(papers)] if papers else [])]
    place = "" if folder == Path() else f"{shlex.quote(str(folder))}/"
    shown = [f"{place}*.json"] if every else []
    return " ".join(["flatrock report", *shown, shlex.join(words)])
