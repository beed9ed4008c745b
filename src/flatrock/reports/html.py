"""Pieces of HTML: text that cannot be mistaken for markup, tables, pictures inside the page."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flatrock.core.files import json_text
from flatrock.reports.table import Table

KINDS = {".png": "image/png", ".svg": "image/svg+xml"}


def text(content: object, tag: str = "p", kind: str = "") -> str:
    """An element that holds text, whatever is in it."""
    return f"<{tag}{_class(kind)}>{escape(str(content))}</{tag}>"


def block(tag: str, *parts: str, kind: str = "", name: str = "") -> str:
    """An element that holds others; `name` is what links lead to."""
    place = f' id="{escape(name)}"' if name else ""
    return f"<{tag}{place}{_class(kind)}>{''.join(parts)}</{tag}>"


def fold(title: str, *parts: str, opened: bool = False) -> str:
    """Parts that are shown once their title is clicked."""
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{''.join(parts)}</details>"


def link(name: str, title: str) -> str:
    """A way to a place of the same page."""
    return f'<a href="#{escape(name)}">{escape(title)}</a>'


def table(
    content: Table, *, bars: Collection[str] = (), names: Mapping[str, str] | None = None, words: bool = False
) -> str:
    """A table of numbers, or of words.

    Cells of columns named in `bars` are percent and drawn as such, `names` link first cells to places.
    """
    head = "".join(text(title, "th") for title in content.header)
    rows = []
    for row in content.rows:
        cells = [_cell(cell, bar=title in bars) for title, cell in zip(content.header, row, strict=True)]
        if names and row[0] in names:
            cells[0] = f"<td>{link(names[row[0]], row[0])}</td>"
        rows.append(block("tr", *cells))
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return block("div", inside, kind="wide words" if words else "wide")


def _cell(content: str, *, bar: bool) -> str:
    try:
        share = min(max(float(content.rstrip("*")), 0.0), 100.0) if bar else None
    except ValueError:  # no number was measured
        share = None
    style = "" if share is None else f' class="bar" style="--share:{share:g}%"'
    return f"<td{style}>{escape(content)}</td>"


def drawn(draw: Callable[[Path], object], what: str) -> str:
    """A figure as `draw` writes it to the path it is given."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        draw(path)
        return picture(path, what)


def picture(path: Path, what: str) -> str:
    """A picture inside the page, which then needs no other file; `what` is read to who cannot see it."""
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(what)}" src="data:{KINDS[path.suffix]};base64,{content}">'


def data(name: str, content: Any) -> str:
    """Values for scripts of the page; a closing tag inside text would end the element."""
    inside = json_text(content).replace("</", "<\\/")
    return f'<script type="application/json" id="{escape(name)}">{inside}</script>'


def _class(kind: str) -> str:
    return f' class="{escape(kind)}"' if kind else ""
