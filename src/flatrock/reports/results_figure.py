"""The page of results as a picture: clean against AutoAttack accuracy, ours and the papers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import dist
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

from flatrock.core.rows import Row
from flatrock.reports.papers import Papers, Protocol
from flatrock.reports.style import COLOURS, LETTERS_PER_INCH, MARKS, blank, caption, dress, mark_of, store

if TYPE_CHECKING:
    from matplotlib.axes import Axes

X, Y = "clean", "autoattack"
# Networks an attack breaks altogether would squeeze the others into a corner.
BROKEN = 5.0
THEIRS = "0.35"
# Where a sign may stand, from its mark, and how near to it another mark disturbs; in points.
SIDES = ((7, 7), (-7, 7), (7, -7), (-7, -7), (0, 10), (0, -10), (11, 0), (-11, 0))
NEAR = 12.0


@dataclass(frozen=True)
class Point:
    """A mark: its sign in the picture, what it is of, where it lies in percent, its standard error (0: not known)."""

    sign: str
    name: str
    x: float
    y: float
    error: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Group:
    """Marks that look alike: the runs of one protocol, or what papers print."""

    title: str
    points: Sequence[Point]
    colour: str
    mark: str
    full: bool


def draw_results(rows: Sequence[Row], papers: Papers, path: Path) -> Path | None:
    """Draw every run that may be compared and, as letters, the papers' figures for them; None without any run."""
    groups, left_out = _groups(rows, papers)
    if not groups:
        return None
    theirs = _theirs(rows, papers)
    groups += [Group("papers", theirs, THEIRS, MARKS[-2], full=False)] if theirs else []
    lines = sum(1 + len(group.points) for group in groups)
    room = max(3.8, max(len(_text(point)) for group in groups for point in group.points) / LETTERS_PER_INCH)
    figure = blank(5.7 + room, max(5, 0.2 * lines + 1))
    axes, legend = figure.subplots(1, 2, width_ratios=(5.7, room))
    for group in groups:
        _draw(axes, group)
    dress(axes, "clean and robust accuracy on test images", "clean, percent", "AutoAttack, percent")
    _list(legend, groups, step=1 / max(lines, 16))
    missing = f" Not drawn: {', '.join(left_out)}." if left_out else ""
    starred = " *: chosen on the test set." if any(row.on_test for row in rows) else ""
    caption(figure, f"Lines: standard errors of a test set of this size.{starred}{missing}")
    figure.draw_without_rendering()  # so that it is known where marks lie
    _sign(axes, groups)
    return store(figure, path)


def _groups(rows: Sequence[Row], papers: Papers) -> tuple[list[Group], list[str]]:
    """Our runs by protocol, numbered throughout, a baseline of several where it comes first, and those left out."""
    groups: list[Group] = []
    left_out: list[str] = []
    drawn: set[Row] = set()
    for i, (key, protocol) in enumerate(papers.protocols.items()):
        first = 1 + sum(len(group.points) for group in groups)
        new = [row for row in papers.runs(key, rows) if row not in drawn]
        points, broken = _ours(new, protocol, first=first)
        drawn |= set(new)
        left_out += broken
        if points:
            title = protocol.title.split(":")[0].strip("`")
            groups.append(Group(title, points, COLOURS[i % len(COLOURS)], mark_of(i), full=True))
    return groups, left_out


def _ours(rows: Sequence[Row], protocol: Protocol, *, first: int) -> tuple[list[Point], list[str]]:
    """Numbered points in the order of the page, and what was left out."""
    points: list[Point] = []
    broken = []
    for name, entry in protocol.rows.items():
        for row in rows:
            usable = row.recipe == name and (row.comparable or row.on_test)
            score = row.scores[row.main or ""] if usable else None
            if score is None or not {X, Y} <= score.right.keys():
                continue
            x, y = (100 * score.accuracy[m] for m in (X, Y))
            label = entry.label + ("*" if row.on_test else "") + (f", seed {row.seed}" if row.seed else "")
            if y < BROKEN:
                broken.append(f"{label} ({x:.2f} / {y:.2f})")
                continue
            error = (100 * score.error[X], 100 * score.error[Y])
            points.append(Point(str(first + len(points)), label, x, y, error))
    return points, broken


def _theirs(rows: Sequence[Row], papers: Papers) -> list[Point]:
    """Published figures of alike networks for rows that were measured, each once."""
    held, tested = {row.recipe for row in rows if row.comparable}, {row.recipe for row in rows if row.on_test}
    found: dict[tuple[str, float, float], Point] = {}
    for protocol in papers.protocols.values():
        for name, entry in protocol.rows.items():
            for figure in entry.papers:
                if name not in held and not (name in tested and figure.on_test):
                    continue
                if {X, Y} <= figure.values.keys() and figure.network in protocol.networks:
                    x, y = figure.values[X], figure.values[Y]
                    # What a row should reach is of another method.
                    said = figure.cite if entry.targets else f"{entry.label}, {figure.cite}"
                    found.setdefault((figure.cite, x, y), Point(ascii_lowercase[len(found) % 26], said, x, y))
    return list(found.values())


def _text(point: Point) -> str:
    return f"{point.sign:>2}  {point.name}, {point.x:.2f} / {point.y:.2f}"


def _draw(axes: Axes, group: Group) -> None:
    for point in group.points:
        xerr, yerr = point.error
        axes.errorbar(
            point.x,
            point.y,
            xerr=xerr,
            yerr=yerr,
            fmt=group.mark,
            color=group.colour,
            ecolor=(group.colour, 0.3),
            markersize=5,
            markerfacecolor=group.colour if group.full else "white",
        )


def _sign(axes: Axes, groups: Sequence[Group]) -> None:
    """Every sign beside its mark, on the side where other marks and the signs before it are farthest."""
    placed = [(group, point) for group in groups for point in group.points]
    marks = [tuple(axes.transData.transform((point.x, point.y))) for _, point in placed]
    unit = axes.figure.dpi / 72  # of offsets, in what transData gives
    signs: list[tuple[float, float]] = []
    for i, (group, point) in enumerate(placed):
        others = [*marks[:i], *marks[i + 1 :], *signs]
        spots = [(marks[i][0] + unit * dx, marks[i][1] + unit * dy) for dx, dy in SIDES]
        # Marks farther away than this do not touch a sign, so the first side serves as well as any.
        room = [min((NEAR, *(dist(spot, other) / unit for other in others))) for spot in spots]
        side = room.index(max(room))
        signs.append(spots[side])
        axes.annotate(
            point.sign,
            (point.x, point.y),
            xytext=SIDES[side],
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8,
            color=group.colour,
        )


def _list(axes: Axes, groups: Sequence[Group], *, step: float) -> None:
    """What the signs stand for, one line under the other."""
    axes.axis("off")
    lines = [(text, g.colour) for g in groups for text in (g.title, *map(_text, g.points))]
    for i, (text, colour) in enumerate(lines):
        axes.text(0, 1 - i * step, text, transform=axes.transAxes, fontsize=7.5, color=colour, va="top")
