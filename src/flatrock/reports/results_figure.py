"""The page of results as a picture: clean against AutoAttack accuracy, ours and the papers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

from flatrock.core.rows import Row
from flatrock.reports.papers import Papers, Protocol
from flatrock.reports.style import COLOURS, MARKS, blank, dress, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes

X, Y = "clean", "autoattack"
# Networks an attack breaks altogether would squeeze the others into a corner.
BROKEN = 5.0
THEIRS = "0.35"


@dataclass(frozen=True)
class Point:
    """A mark: its sign in the picture, what it is of, where it lies in percent, its standard error (0: not known)."""

    sign: str
    name: str
    x: float
    y: float
    error: tuple[float, float] = (0.0, 0.0)


def draw_results(rows: Sequence[Row], papers: Papers, path: Path) -> Path | None:
    """Draw every run that may be compared and, as letters, the papers' figures for them; None without any run."""
    figure = blank(9.5, 5)
    axes, legend = figure.subplots(1, 2, width_ratios=(3, 2))
    lines: list[tuple[str, str]] = []
    left_out: list[str] = []
    ours = 0
    for i, (key, protocol) in enumerate(papers.protocols.items()):
        points, broken = _ours([row for row in rows if row.protocol == key], protocol, first=ours + 1)
        left_out += broken
        if points:
            lines += [
                (protocol.title.split(":")[0].strip("`"), COLOURS[i % len(COLOURS)]),
                *((_text(p), COLOURS[i % len(COLOURS)]) for p in points),
            ]
            _draw(axes, points, colour=COLOURS[i % len(COLOURS)], mark=MARKS[i % len(MARKS)], full=True)
        ours += len(points)
    if not ours:
        return None
    theirs = _theirs(rows, papers)
    if theirs:
        lines += [("papers", THEIRS), *((_text(p), THEIRS) for p in theirs)]
        _draw(axes, theirs, colour=THEIRS, mark=MARKS[-2], full=False)
    dress(axes, "clean and robust accuracy on test images", "clean, percent", "AutoAttack, percent")
    _list(legend, lines)
    missing = f" Not drawn: {', '.join(left_out)}." if left_out else ""
    return finish(figure, f"Lines: standard errors of a test set of this size.{missing}", path)


def _ours(rows: Sequence[Row], protocol: Protocol, *, first: int) -> tuple[list[Point], list[str]]:
    """Numbered points in the order of the page, and what was left out."""
    points: list[Point] = []
    broken = []
    for name, entry in protocol.rows.items():
        for row in rows:
            score = row.scores[row.main or ""] if row.recipe == name and row.comparable else None
            if score is None or not {X, Y} <= score.right.keys():
                continue
            x, y = (100 * score.accuracy[m] for m in (X, Y))
            label = entry.label + (f", seed {row.seed}" if row.seed else "")
            if y < BROKEN:
                broken.append(f"{label} ({x:.2f} / {y:.2f})")
                continue
            error = (100 * score.error[X], 100 * score.error[Y])
            points.append(Point(str(first + len(points)), label, x, y, error))
    return points, broken


def _theirs(rows: Sequence[Row], papers: Papers) -> list[Point]:
    """Published figures of alike networks for rows that were measured, each once."""
    measured = {row.recipe for row in rows if row.comparable}
    found: dict[tuple[str, float, float], Point] = {}
    for protocol in papers.protocols.values():
        for name, entry in protocol.rows.items():
            for figure in entry.papers if name in measured else ():
                if {X, Y} <= figure.values.keys() and figure.network in protocol.networks:
                    x, y = figure.values[X], figure.values[Y]
                    # What a row should reach is of another method.
                    said = figure.cite if entry.targets else f"{entry.label}, {figure.cite}"
                    found.setdefault((figure.cite, x, y), Point(ascii_lowercase[len(found) % 26], said, x, y))
    return list(found.values())


def _text(point: Point) -> str:
    return f"{point.sign:>2}  {point.name}, {point.x:.2f} / {point.y:.2f}"


def _draw(axes: Axes, points: Sequence[Point], *, colour: str, mark: str, full: bool) -> None:
    for point in points:
        xerr, yerr = point.error
        axes.errorbar(
            point.x,
            point.y,
            xerr=xerr,
            yerr=yerr,
            fmt=mark,
            color=colour,
            ecolor=(colour, 0.3),
            markersize=5,
            markerfacecolor=colour if full else "white",
        )
        axes.annotate(
            point.sign, (point.x, point.y), xytext=(4, 4), textcoords="offset points", fontsize=8, color=colour
        )


def _list(axes: Axes, lines: Sequence[tuple[str, str]]) -> None:
    """What the signs stand for."""
    axes.axis("off")
    step = 1 / max(len(lines), 16)
    for i, (text, colour) in enumerate(lines):
        axes.text(0, 1 - i * step, text, transform=axes.transAxes, fontsize=7.5, color=colour, va="top")
