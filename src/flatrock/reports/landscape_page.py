"""Landscapes as one HTML file to turn, zoom and read in a browser; it needs no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatrock.core.files import write_atomic
from flatrock.diagnostics.surface import Array, Landscape
from flatrock.reports.landscape import caption, check_alike, labels
from flatrock.reports.style import SURFACE, line_style

TITLES = {
    "weight-1d": "Loss along random directions in weight space",
    "weight-2d": "Loss over two random directions in weight space",
    "input": "Loss around images: sign of the gradient and random signs",
}
# SVG's words for the line styles of the static figures.
DASHES = {"-": "", "--": "8 5", "-.": "8 4 2 4", ":": "2 4"}
DIGITS = 6


def draw_page(records: Sequence[Landscape], path: Path) -> Path:
    """Write the page; all it shows is inside it."""
    check_alike(records)
    first = records[0]
    content = {
        "kind": first.kind,
        "title": TITLES[first.kind],
        "caption": caption(records),
        "axis": list(first.axis),
        "items": _items(first),
        "records": [_shown(i, name, r) for i, (name, r) in enumerate(zip(labels(records), records, strict=True))],
    }
    # A closing tag inside text would end the script element.
    data = json.dumps(content, allow_nan=False).replace("</", "<\\/")
    page = Path(__file__).with_name("landscape.html").read_text(encoding="utf-8")
    page = page.replace("@STOPS@", json.dumps(_stops())).replace("@DATA@", data)
    write_atomic(path, page.encode())
    return path


def _items(record: Landscape) -> list[str]:
    """What each curve or surface of a record is of."""
    if record.kind == "input":
        return [f"image {s['id']}, class {s['class']}" for s in record.samples]
    return [f"{'direction' if record.kind == 'weight-1d' else 'pair'} {k + 1}" for k in range(record.count)]


def _shown(i: int, name: str, record: Landscape) -> dict[str, Any]:
    style = line_style(i)
    values = {key: _rounded(array) for key, array in record.values.items()}
    return {"label": name, "colour": style["color"], "dash": DASHES[style["linestyle"]], "values": values}


def _rounded(array: Array) -> list[Any]:
    """A few digits are enough for the eye."""
    cells = np.round(array, DIGITS).astype(object)
    cells[~np.isfinite(array)] = None
    rows: list[Any] = cells.tolist()
    return rows


def _stops() -> list[list[int]]:
    """The colours of the static surfaces, at nine places."""
    from matplotlib import colormaps

    return [[round(255 * float(c)) for c in colormaps[SURFACE](i / 8)[:3]] for i in range(9)]
