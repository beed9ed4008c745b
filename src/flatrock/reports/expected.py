"""Rows beside what their recipes expect: within the bands, below or above, and by how much."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from flatrock.core.bands import Bands, band_text, bands_text, missed, outside
from flatrock.core.rows import Row
from flatrock.reports.table import Table, markdown

PASS, MISSED = "PASS", "MISSED"
EXPECTED = """\
What the recipes expect, in percent, and whether the rows are within. The bands of flatrock's recipes are made of rows
it keeps (docs/reproduce.md)."""


def expected_table(
    names: Sequence[str], rows: Sequence[Row], bands: Mapping[Hashable, Bands], *, ranges: bool = False
) -> Table:
    """One line per row that has bands: how far each measure is outside of its band, which is told with `ranges`."""
    judged = [(name, row, bands[row.key]) for name, row in zip(names, rows, strict=True) if row.key in bands]
    measures = list(dict.fromkeys(measure for _, row, known in judged for measure in outside(row, known)))
    lines = []
    for name, row, known in judged:
        found = outside(row, known)
        said = {key: f"{band_text(known[key])}: " if ranges else "" for key in found}
        cells = (f"{said[key]}{away(found[key])}" if key in found else "" for key in measures)
        lines.append((name, *cells, MISSED if missed(row, known) else PASS))
    return Table(("recipe", *measures, "verdict"), tuple(lines))


def away(points: float) -> str:
    """-0.4 -> 'below by 0.40'."""
    return "as expected" if points == 0 else f"{'below' if points < 0 else 'above'} by {abs(points):.2f}"


def expected_line(row: Row, bands: Bands) -> str:
    """What was expected of one row, and what became of it."""
    faults = [f"{name} {away(points)}" for name, points in outside(row, bands).items() if points]
    faults += ["collapsed"] if row.collapsed else []
    return f"expected {bands_text(bands)}: {', '.join([MISSED, *faults]) if faults else PASS}"


def expected_summary(rows: Sequence[Row], bands: Mapping[Hashable, Bands]) -> str:
    """How many rows are as expected; nothing if nothing is expected of any. A run that failed has missed everything."""
    judged = [row for row in rows if row.key in bands]
    if not judged:
        return ""
    good = sum(not missed(row, bands[row.key]) for row in judged)
    failed = sum(row.status == "failed" for row in rows)
    others = [row for row in rows if row.key not in bands and row.status != "failed"]
    rest = sum(not row.stands_in for row in others)  # those are told by plain_lines
    more = f"; {failed} more failed" if failed else ""
    more += f"; {rest} more, changed or not measured yet, have nothing to be compared with" if rest else ""
    verdict = PASS if good == len(judged) and not failed else MISSED
    return f"{verdict}: {good} of {len(judged)} rows as their recipes expect{more}"


def plain_lines(names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """The rows that are known by plain weights in the place of averaged ones, of which bands would be."""
    told = "averaged weights collapsed, bands are of those"
    return [f"no band for plain weights, {n}: {told}" for n, row in zip(names, rows, strict=True) if row.stands_in]


def expected_parts(names: Sequence[str], rows: Sequence[Row], bands: Mapping[Hashable, Bands]) -> list[str]:
    """The same for a page; nothing if nothing is expected of any."""
    summary, plain = expected_summary(rows, bands), [f"{line}." for line in plain_lines(names, rows)]
    if not summary:
        return plain
    return [EXPECTED, markdown(expected_table(names, rows, bands, ranges=True)), f"{summary}.", *plain]
