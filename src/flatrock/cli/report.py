"""`flatrock report`: results files -> a page beside the papers' figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import friendly, say
from flatrock.cli.shared import check_page, recognised
from flatrock.core.errors import ConfigError
from flatrock.core.files import write_atomic
from flatrock.core.rows import read_rows
from flatrock.reports.papers import Papers, read_papers
from flatrock.reports.results import results_page
from flatrock.reports.results_curves import draw_curves
from flatrock.reports.results_figure import draw_results

Files = Annotated[
    list[Path], typer.Argument(metavar="RESULTS...", help="files of `flatrock results`; others are left out")
]
Out = Annotated[Path, typer.Option(help="the .md file to write")]
Figures = Annotated[
    Path | None,
    typer.Option("--papers", help="the papers' figures; default: papers.yaml beside the first file, if there"),
]


def run(results: Files, out: Out, papers: Figures = None) -> None:
    """Write the page of results: one table per protocol beside the papers' figures, and what became of their claims."""
    with friendly():
        picture = out.with_suffix(".png")
        check_page(out, picture)
        found = recognised(results, read_rows, "flatrock results")
        beside = results[0].parent / "papers.yaml"
        if papers is None and not beside.exists():
            say(f"there is no {beside}: a page without the papers' figures (name them with --papers)")
        known = read_papers(papers or beside) if papers or beside.exists() else Papers()
        rows, used = [row for _, part in found for row in part], [file.name for file, _ in found]
        keys = [(row.recipe, row.seed, row.changes) for row in rows]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(f"{twice[0][0]} with seed {twice[0][1]} is in the files twice; leave one out")
        drawn = {"": draw_results(rows, known, picture)}
        for key, protocol in known.protocols.items():
            curves = out.with_name(f"{out.stem}-{key}.png")
            drawn[key] = draw_curves([row for row in rows if row.protocol == key], protocol, curves)
        pictures = {key: file.name for key, file in drawn.items() if file}
        write_atomic(out, results_page(rows, known, used, pictures).encode())
        say(f"wrote {out}: {len(rows)} runs")
        for name in pictures.values():
            say(f"drew {out.with_name(name)}")
