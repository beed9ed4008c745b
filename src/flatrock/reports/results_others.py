"""Runs that no paper prints, as a picture: clean accuracy and the worst case, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path

from flatrock.core.rows import Row
from flatrock.reports.names import row_names
from flatrock.reports.style import COLOURS, MARKS, blank, dress, finish

KINDS = (("clean", COLOURS[0], MARKS[0]), ("right under every attack named", COLOURS[1], MARKS[1]))


def draw_others(rows: Sequence[Row], path: Path) -> Path | None:
    """Draw the best epoch of every run that was evaluated; the others have an empty line. None without any."""
    scores = [row.scores[row.main] if row.main else None for row in rows]
    if not any(scores):
        return None
    figure = blank(7.5, 1.4 + 0.22 * len(rows))
    axes = figure.subplots()
    for place, score in enumerate(scores):
        shares = [] if score is None else [score.accuracy["clean"], float(score.worst.double().mean())]
        for share, (_, colour, mark) in zip(shares, KINDS, strict=False):
            error = 100 * sqrt(share * (1 - share) / (score.n if score else 1))
            axes.errorbar(100 * share, place, xerr=error, fmt=mark, color=colour, ecolor=(colour, 0.4), markersize=5)
    for label, colour, mark in KINDS:
        axes.plot([], [], mark, color=colour, label=label, markersize=5)
    axes.set_yticks(range(len(rows)), row_names(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(-2, 102)
    dress(axes, "accuracy on test images", "percent", "")
    figure.legend(frameon=False, fontsize=8, loc="outside upper right", ncols=2)
    return finish(
        figure,
        "Each under the threat and the attacks of its recipe. Lines: standard errors of a test set of this size.",
        path,
    )
