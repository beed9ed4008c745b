"""The page of results and its pictures, written to disk."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flatrock.core.bands import Bands
from flatrock.core.files import write_atomic
from flatrock.core.rows import Row
from flatrock.reports.given import read_given
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
    drawn = {"": draw_results(rows, papers, out.with_suffix(".png"))}
    for key, protocol in papers.protocols.items():
        curves = out.with_name(f"{out.stem}-{key}.png")
        drawn[key] = draw_curves(papers.runs(key, rows), protocol, curves)
    drawn[OTHERS] = draw_others(papers.others(rows), out.with_name(f"{out.stem}-{OTHERS}.png"))
    pictures = {key: file for key, file in drawn.items() if file}
    names = {key: file.name for key, file in pictures.items()}
    listed = [file.name for file in files]
    page = results_page(rows, papers, listed, names, notes=read_notes(files), bands=bands, command=command)
    write_atomic(out, page.encode())
    return list(pictures.values())


def read_notes(files: Iterable[Path]) -> dict[str, str]:
    """What somebody wrote about rows of these results files into a notes.yaml beside them: recipe to text."""
    beside = dict.fromkeys(file.parent / "notes.yaml" for file in files)
    found = [read_given(path, _notes, what="notes", option="that name") for path in beside if path.exists()]
    return {name: text for notes in found for name, text in notes.items()}


def _notes(raw: Any) -> dict[str, str]:
    for name, text in raw.items():
        if not isinstance(text, str):
            raise ValueError(f"the note on {name} is {text!r}, not a text")
    return dict(raw)
