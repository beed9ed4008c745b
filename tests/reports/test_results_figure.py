"""The picture of the results: every run that may be compared once, what papers print for it once, the rest named."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image
from results_cases import N, fake_run

from flatrock.core.rows import Row
from flatrock.reports import results_figure
from flatrock.reports.papers import OWN, read_papers
from flatrock.reports.results_figure import draw_results
from flatrock.workflows.results import collect_run

PAPERS = read_papers(OWN)
AT = {"clean": 81.0, "pgd-20": 51.0, "cw-20": 49.0, "autoattack": 48.0}


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    runs = [
        fake_run(tmp_path, "cifar10_flagship", {**AT, "clean": 84.0, "autoattack": 52.0}, averages=True),
        fake_run(tmp_path, "cifar10_short_at", AT),
        fake_run(tmp_path, "cifar10_short_standard", {**AT, "clean": 94.0, "autoattack": 0.0}),
        fake_run(tmp_path, "cifar10_short_trades", AT, overrides={"train.epochs": 3}),
        fake_run(tmp_path, "cifar10_short_mart", {}, status="failed"),
        fake_run(tmp_path, "digits_at", AT),
    ]
    return [collect_run(run) for run in runs]


def drawn(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The figure before it becomes a file."""
    seen: list[Figure] = []

    def look(figure: Figure, path: Path) -> Path:
        seen.append(figure)
        return path

    monkeypatch.setattr("flatrock.reports.results_figure.store", look)
    draw_results(rows, PAPERS, Path("results.png"))
    return seen[0]


def test_what_is_drawn(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a changed recipe, a failed run or one of no protocol; a broken network only by name."""
    figure = drawn(rows, monkeypatch)
    assert figure.get_supxlabel().endswith("Not drawn: standard (94.00 / 0.00).")
    axes, legend = figure.axes
    told = [text.get_text() for text in legend.texts]
    assert told == [
        "short",
        " 1  AT, 81.00 / 48.00",
        "flagship",
        " 2  HAT + RAT + AWP + SWA, 84.00 / 52.00",
        "papers",
        " a  AT, RAT (Jin et al. 2023) Table 8, 82.41 / 47.10",
        " b  RobustBench, best ResNet-18 without extra data, 85.71 / 52.48",
    ]
    marks = {text.get_text(): text.xy for text in axes.texts}
    assert marks == {"1": (81.0, 48.0), "2": (84.0, 52.0), "a": (82.41, 47.10), "b": (85.71, 52.48)}
    # sqrt(0.81 * 0.19 / 1000) and sqrt(0.48 * 0.52 / 1000) to both sides
    spans = [segment for bars in axes.containers[0].lines[2] for segment in bars.get_segments()]
    assert [(round(float(b[i] - a[i]) / 2, 4)) for i, (a, b) in enumerate(spans)] == [1.2406, 1.5799]
    assert N == 1000


def test_signs_and_lines_do_not_lie_on_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve runs as near to each other as runs of one protocol are, and every paper's figure for them."""
    names = ["at", "at_trh", "at_swa", "at_rat", "trades", "trades_awp", "trades_rat1", "trades_rat2", "mart", "alp"]
    runs = [
        fake_run(
            tmp_path,
            f"cifar10_short_{name}",
            {**AT, "clean": 80 + 0.3 * (i % 4), "autoattack": 46 + 0.3 * (i // 4)},
            averages=name == "at_swa",
        )
        for i, name in enumerate(names)
    ]
    far = {**AT, "clean": 74.0, "autoattack": 42.0}
    figure = drawn([collect_run(run) for run in [*runs, fake_run(tmp_path, "cifar10_short_at_awp", far)]], monkeypatch)
    axes, legend = figure.axes
    for texts, gap in ((axes.texts, 0.0), (legend.texts, 1.0)):
        boxes = [text.get_window_extent() for text in texts]
        assert len(boxes) > 10
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.padded(gap).overlaps(b)]


def test_every_line_ends_inside_the_picture(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a citation is."""
    monkeypatch.setattr(results_figure, "_text", lambda point: f"{point.name}, a citation of many words{60 * ' and'}")
    figure = drawn(rows, monkeypatch)
    ends = [text.get_window_extent().x1 for text in figure.axes[1].texts]
    assert figure.axes[1].get_window_extent().x0 < max(ends) < figure.bbox.x1


def test_a_file_or_nothing(rows: list[Row], tmp_path: Path) -> None:
    path = draw_results(rows, PAPERS, tmp_path / "results.png")
    assert path is not None
    with Image.open(path) as picture:
        assert picture.size[0] > 1000
    for few in ([], rows[2:]):
        assert draw_results(few, PAPERS, tmp_path / "none.png") is None
    assert not (tmp_path / "none.png").exists()
