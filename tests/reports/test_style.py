"""Names of curves: inside a panel while they are few, beside the panels where they would cover it."""

from __future__ import annotations

import pytest

from flatrock.reports.style import COLOURS, LINE, MARKS, MOST_INSIDE, blank, legend, mark_of


@pytest.mark.parametrize("count", [1, MOST_INSIDE])
def test_few_names_stand_in_their_own_panel(count: int) -> None:
    figure = blank(8.0, 4.0)
    for panel in (panels := figure.subplots(1, 2)):
        for i in range(count):
            panel.plot([0, 1], [i, i], label=f"run {i}")
    legend(*panels, title="runs")
    for panel in panels:
        inside = panel.get_legend()
        assert inside.get_title().get_text() == "runs"
        assert [text.get_text() for text in inside.get_texts()] == [f"run {i}" for i in range(count)]
    assert figure.legends == []
    assert figure.get_figwidth() == 8.0


@pytest.mark.parametrize("count", [MOST_INSIDE + 1, 60])
def test_many_names_stand_beside_panels_of_the_same_size(count: int) -> None:
    figure, few = blank(8.0, 4.0), blank(8.0, 4.0)
    panels, others = figure.subplots(1, 2), few.subplots(1, 2)
    others[0].plot([0, 1], [0, 1])
    for i in range(count):
        panels[0].plot([0, 1], [i, i], label=f"a rather long name of a run {i}")
    panels[1].plot([0, 1], [0, 1], label="of the other panel")
    legend(*panels)
    for drawn in (figure, few):
        drawn.draw_without_rendering()
    (beside,) = figure.legends
    assert len(beside.get_texts()) == count + 1
    assert all(panel.get_legend() is None for panel in panels)
    box, whole = beside.get_window_extent(), figure.bbox
    assert box.x1 <= whole.x1 and box.y0 >= whole.y0 and box.height <= LINE * (count + 3) * figure.dpi
    assert not any(box.overlaps(panel.get_window_extent()) for panel in panels)
    mine, theirs = (one[0].get_window_extent().width for one in (panels, others))
    assert mine == pytest.approx(theirs, rel=0.1)


def test_a_colour_comes_back_with_another_mark() -> None:
    several = [(COLOURS[i % len(COLOURS)], mark_of(i)) for i in range(len(COLOURS) * len(MARKS))]
    assert len(set(several)) == len(several)
    assert [mark_of(i) for i in range(len(MARKS))] == list(MARKS)
