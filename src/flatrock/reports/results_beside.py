"""The papers' figures beside our rows: theirs, and ours minus theirs where the network is alike."""

from __future__ import annotations

from collections.abc import Container, Sequence

from flatrock.core.rows import Row
from flatrock.reports.claims import beside_rows, by_recipe, score_at, value
from flatrock.reports.papers import Measure, Protocol
from flatrock.reports.table import Table


def beside(protocol: Protocol, rows: Sequence[Row], *, on_test: bool = False) -> Table:
    """The papers' figures for our rows, and ours minus theirs (the mean over our seeds) where the network is alike.

    Where theirs is of the first test samples alone, so is ours. Beside rows chosen on the test set, marked `*`, stand
    figures that were chosen so.
    """
    known, star = by_recipe(rows, on_test=on_test), "*" if on_test else ""
    lines = []
    for name, entry in protocol.rows.items():
        shown = [figure for figure in entry.papers if beside_rows(figure, on_test=on_test)]
        for figure in shown if name in known else ():
            scores = [score_at(row, figure.end) for row in known[name].values() if figure.network in protocol.networks]
            cells = []
            for key, measure in protocol.measures.items():
                first = figure.samples.get(key, 0)
                ours = [value(score, measure, first=first) for score in scores if score is not None]
                cells.append(_beside(measure, figure.values.get(key), [v for v in ours if v is not None]))
            lines.append((f"{entry.label}{star}", figure.where, *cells))
    return Table(("method", "paper", *(measure.name for measure in protocol.measures.values())), tuple(lines))


def part_of_images(protocol: Protocol, names: Container[str]) -> str:
    """What figures set beside these recipes are of the first test images alone, in a sentence; nothing if none is."""
    shown = [figure for name, entry in protocol.rows.items() if name in names for figure in entry.papers]
    alike = [figure for figure in shown if figure.network in protocol.networks]
    found = dict.fromkeys(
        (k, n) for f in alike for k, n in f.samples.items() if k in f.values and k in protocol.measured
    )
    told = ", ".join(f"{protocol.measures[key].name} of {count:,}" for key, count in found)
    return f" Where theirs is of the first test images alone ({told}), so is ours there." if told else ""


def _beside(measure: Measure, theirs: float | None, ours: Sequence[float]) -> str:
    if theirs is None:
        return ""
    gap = f" ({measure.written(sum(ours) / len(ours) - theirs, '+')})" if ours else ""
    return measure.written(theirs) + gap
