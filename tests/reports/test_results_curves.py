"""The picture of robust overfitting: the curves of runs whose last epoch papers print too, and of no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from results_cases import fake_run

from flatrock.core.rows import Row
from flatrock.reports.papers import OWN, read_papers
from flatrock.reports.results_curves import draw_curves
from flatrock.workflows.results import collect_run

PROTOCOLS = read_papers(OWN).protocols
FULL = PROTOCOLS["cifar10_full"]
FOUND = {"clean": 81.0, "pgd-20": 51.0, "cw-20": 49.0, "autoattack": 48.0}


def without_curve(row: Row) -> Row:
    return replace(row, selection={k: v for k, v in row.selection.items() if k != "curve"})


@pytest.fixture
def row(tmp_path: Path) -> Row:
    return collect_run(fake_run(tmp_path, "cifar10_full_at", FOUND))


def test_what_is_drawn(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Figure] = []

    def look(figure: Figure, text: str, path: Path) -> Path:
        seen.append(figure)
        assert text == "Strong: held-out images; pale: images trained on."
        return path

    monkeypatch.setattr("flatrock.reports.results_curves.finish", look)
    gap: dict[str, Any] = {**row.selection["curve"], "train_robust": [0.4, None, 0.58]}
    again = replace(row, seed=1, selection={**row.selection, "curve": gap})
    draw_curves([row, again], FULL, tmp_path / "curves.png")
    axes = seen[0].axes[0]
    lines = [np.round(np.asarray(line.get_xydata(), float), 6).tolist() for line in axes.lines if len(line.get_xdata())]
    held, best, last = [[1, 30], [2, 52], [3, 48]], [[2, 52]], [[3, 48]]
    assert lines[:4] == [held, [[1, 40], [2, 62], [3, 58]], best, last]
    assert lines[4] == held
    assert np.isnan(lines[5][1][1]) and lines[5][2] == [3, 58]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["AT", "AT, seed 1", "best epoch", "last epoch"]
    draw_curves([replace(row, seed=seed) for seed in range(5)], FULL, tmp_path / "curves.png")
    many = seen[1]
    assert many.axes[0].get_legend() is None and len(many.legends[0].get_texts()) == 7
    many.draw_without_rendering()
    assert not many.legends[0].get_window_extent().overlaps(many.axes[0].get_window_extent())


def test_a_file_or_nothing(row: Row, tmp_path: Path) -> None:
    path = draw_curves([row], FULL, tmp_path / "curves.png")
    assert path is not None
    with Image.open(path) as picture:
        assert picture.size[0] > 1000
    changed = replace(row, changes=("train.epochs: 3 instead of 200",))
    short = collect_run(fake_run(tmp_path, "cifar10_short_at", FOUND))
    for few, protocol in (
        ([], FULL),
        ([changed, without_curve(row)], FULL),
        ([short], PROTOCOLS["cifar10_short"]),  # no paper prints the last epoch for it
    ):
        assert draw_curves(few, protocol, tmp_path / "none.png") is None
    assert not (tmp_path / "none.png").exists()
