"""The picture of runs that no paper prints: a line each, clean accuracy and the worst case."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from results_cases import N, fake_run

from flatrock.reports.results_others import draw_others
from flatrock.workflows.results import collect_run

FOUND = {"clean": 80.0, "pgd-20": 51.0, "cw-20": 49.0, "autoattack": 48.0}


def test_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Figure] = []

    def look(figure: Figure, text: str, path: Path) -> Path:
        seen.append(figure)
        return path

    monkeypatch.setattr("flatrock.reports.results_others.finish", look)
    rows = [
        collect_run(fake_run(tmp_path, "digits_at", FOUND)),
        collect_run(fake_run(tmp_path, "digits_mart", {}, status="failed")),
        collect_run(fake_run(tmp_path, "digits_alp", {**FOUND, "pgd-20": 30.0}, overrides={"train.epochs": 3})),
    ]
    assert draw_others(rows, tmp_path / "a.png") == tmp_path / "a.png"
    axes = seen[0].axes[0]
    points = [tuple(np.round(line.get_xydata()[0], 6)) for line in axes.lines if len(line.get_xdata()) == 1]
    assert points == [(80, 0), (48, 0), (80, 2), (30, 2)], "clean, worst case; a run that failed has none"
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "digits_at",
        "digits_mart FAILED",
        "digits_alp, changed",
    ]
    low, high = axes.collections[1].get_segments()[0][:, 0]
    assert (high - low) / 2 == pytest.approx(100 * (0.48 * 0.52 / N) ** 0.5)


def test_nothing_to_draw(tmp_path: Path) -> None:
    row = collect_run(fake_run(tmp_path, "digits_mart", {}, status="failed"))
    assert draw_others([], tmp_path / "a.png") is draw_others([row], tmp_path / "a.png") is None
    assert not (tmp_path / "a.png").exists()
