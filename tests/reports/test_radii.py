"""Accuracy over eps: a row per radius, and curves that begin at the clean accuracy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from results_cases import N, fake_result

from flatrock.core.errors import StateError
from flatrock.core.records import Result
from flatrock.reports.radii import draw_radii, evaluated_radii


def at(eps: float, **percents: float) -> Result:
    found = {name.replace("_", "-"): value for name, value in percents.items()}
    return replace(fake_result("digits_at", "best", 2, {"clean": 80.0, **found}), threat={"norm": "linf", "eps": eps})


RADII = {"8/255": at(8 / 255, pgd_20=50.0, cw_20=40.0), "0.01": at(0.01, pgd_20=70.0, cw_20=70.0)}


def test_a_row_per_radius_as_it_is_written() -> None:
    table = evaluated_radii(RADII)
    assert table.header == ("eps", "clean", "pgd-20", "cw-20", "worst case")
    assert table.rows == (("8/255", "80.00", "50.00", "40.00", "40.00"), ("0.01", "80.00", "70.00", "70.00", "70.00"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    figures: list[Figure] = []
    monkeypatch.setattr("flatrock.reports.radii.finish", lambda figure, text, path: figures.append(figure) or path)
    return figures


def test_what_is_drawn(seen: list[Figure], tmp_path: Path) -> None:
    draw_radii(RADII, tmp_path / "a.png", name="mine")
    axes = seen[0].axes[0]
    curves = {bars.get_label(): bars for bars in axes.containers}
    assert list(curves) == ["pgd-20", "cw-20", "worst case"]
    points = np.asarray(curves["pgd-20"].lines[0].get_xydata())
    assert np.allclose(points, [(0, 80), (0.01, 70), (8 / 255, 50)]), "in order of the radius, from clean"
    low, high = curves["pgd-20"].lines[2][0].get_segments()[1][:, 1]
    assert (high - low) / 2 == pytest.approx(100 * (0.7 * 0.3 / N) ** 0.5)
    assert axes.get_title(loc="left") == "mine: accuracy over the radius"


def test_one_attack_is_one_curve(seen: list[Figure], tmp_path: Path) -> None:
    draw_radii({"a": at(0.01, pgd_20=70.0), "b": at(0.02, pgd_20=60.0)}, tmp_path / "a.png", name="mine")
    assert [bars.get_label() for bars in seen[0].axes[0].containers] == ["worst case (pgd-20)"]


def test_a_file_is_written(tmp_path: Path) -> None:
    assert draw_radii(RADII, tmp_path / "a.png", name="mine").stat().st_size > 5000


def test_no_curve_through_different_questions(tmp_path: Path) -> None:
    other = replace(RADII["0.01"], threat={"norm": "l2", "eps": 0.01})
    for results in ({"a": RADII["0.01"]}, {"a": RADII["8/255"], "b": other}):
        with pytest.raises(StateError, match="needs two results or more in one norm on the same samples"):
            draw_radii(results, tmp_path / "a.png", name="mine")
    assert not (tmp_path / "a.png").exists()
