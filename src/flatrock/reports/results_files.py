"""The page of results and its pictures, written to disk."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from flatrock.core.bands import Bands
from flatrock.core.files import write_atomic
from flatrock.core.rows import Row
from flatrock.reports.notes import noted, read_notes
from flatrock.reports.papers import Papers
from flatrock.reports.results import COMMAND, OTHERS, results_page
from flatrock.reports.results_curves import draw_curves
from flatrock.reports.results_figure import draw_results
from flatrock.reports.results_others import draw_others


def write_results(
    rows: Sequence[Row],
    papers: Papers,
    files: Sequence[Path],
    out: Path,
    *,
    bands: Mapping[Hashable, Bands] = MappingProxyType({}),
    command: str = COMMAND,
) -> list[Path]:
    """Write the page of the rows of these files and, beside it, its pictures, which are returned.

    It has the notes beside the files, too, and beside rows with `bands`, by their keys, what is expected of them.
    """
    notes = read_notes(files)
    rows = noted(rows, notes)
    drawn = {"": draw_results(rows, papers, out.with_suffix(".png"))}
    for key, protocol in papers.protocols.items():
        curves = out.with_name(f"{out.stem}-{key}.png")
        drawn[key] = draw_curves(papers.runs(key, rows), protocol, curves)
    drawn[OTHERS] = draw_others(papers.others(rows), out.with_name(f"{out.stem}-{OTHERS}.png"))
    pictures = {key: file for key, file in drawn.items() if file}
    names = {key: file.name for key, file in pictures.items()}
    listed = [file.name for file in files]
    page = results_page(rows, papers, listed, names, notes=notes, bands=bands, command=command)
    write_atomic(out, page.encode())
    return list(pictures.values())
