"""Rows beside what their recipes expect, as tables, lines and parts of a page."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import pytest
from results_cases import fake_run

from flatrock.core.bands import Bands
from flatrock.core.rows import Row
from flatrock.reports.expected import away, expected_line, expected_parts, expected_summary, expected_table
from flatrock.workflows.results import collect_run

NAMES = ("digits_at", "digits_trades", "digits_mart")
GOOD: Bands = {"clean": (79.0, 80.0), "pgd-20": (50.0, 52.0)}
BAD: Bands = {"clean": (80.5, 90.0), "fgsm": (58.0, 59.75)}


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    percents = {"clean": 80.0, "fgsm": 60.0, "pgd-20": 51.0}
    return [collect_run(fake_run(tmp_path, name, percents)) for name in NAMES]


@pytest.fixture
def bands(rows: list[Row]) -> dict[Hashable, Bands]:
    """Of the third nothing is expected."""
    return {rows[0].key: GOOD, rows[1].key: BAD}


@pytest.mark.parametrize(
    ("points", "text"),
    [(0.0, "as expected"), (-0.4, "below by 0.40"), (12.0, "above by 12.00"), (0.01, "above by 0.01")],
)
def test_words(points: float, text: str) -> None:
    assert away(points) == text


def test_the_table(rows: list[Row], bands: dict[Hashable, Bands]) -> None:
    table = expected_table(NAMES, rows, bands)
    assert table.header == ("recipe", "clean", "pgd-20", "fgsm", "verdict")
    assert table.rows == (
        ("digits_at", "as expected", "as expected", "", "PASS"),
        ("digits_trades", "below by 0.50", "", "above by 0.25", "MISSED"),
    )
    ranges = expected_table(NAMES, rows, bands, ranges=True).rows
    assert ranges[0][1:3] == ("79-80: as expected", "50-52: as expected")
    assert ranges[1] == ("digits_trades", "80.5-90: below by 0.50", "", "58-59.75: above by 0.25", "MISSED")


def test_one_row_in_a_line(rows: list[Row]) -> None:
    assert expected_line(rows[0], GOOD) == "expected clean 79-80, pgd-20 50-52: PASS"
    told = "expected clean 80.5-90, fgsm 58-59.75: MISSED, clean below by 0.50, fgsm above by 0.25"
    assert expected_line(rows[0], BAD) == told


def test_a_collapsed_row_has_missed_whatever_its_numbers(rows: list[Row], bands: dict[Hashable, Bands]) -> None:
    score = replace(rows[0].scores["best"], findings=("E15: one answer to everything",))
    row = replace(rows[0], scores={"best": score})
    assert row.judged and row.collapsed and not row.comparable
    assert expected_line(row, GOOD) == "expected clean 79-80, pgd-20 50-52: MISSED, collapsed"
    assert expected_table(NAMES[:1], [row], bands).rows == (("digits_at", "as expected", "as expected", "MISSED"),)
    assert expected_summary([row], bands) == "MISSED: 0 of 1 rows as their recipes expect"


def test_the_summary(rows: list[Row], bands: dict[Hashable, Bands]) -> None:
    rest = "; 1 more, changed or not measured yet, have nothing to be compared with"
    assert expected_summary(rows, bands) == f"MISSED: 1 of 2 rows as their recipes expect{rest}"
    assert expected_summary(rows[:1], bands) == "PASS: 1 of 1 rows as their recipes expect"
    failed = replace(rows[2], status="failed")
    told = "MISSED: 1 of 1 rows as their recipes expect; 1 more failed"
    assert expected_summary([rows[0], failed], bands) == told, "it is no pass"
    assert expected_summary([rows[0], failed, rows[2]], bands) == f"{told}{rest}"
    assert expected_summary(rows[2:], bands) == expected_summary([], bands) == expected_summary(rows, {}) == ""


def test_a_page_without_bands_is_what_it_was(rows: list[Row], bands: dict[Hashable, Bands]) -> None:
    assert expected_parts(NAMES, rows, {}) == []
    text, table, summary = expected_parts(NAMES, rows, bands)
    assert "docs/reproduce.md" in text and summary.startswith("MISSED: 1 of 2") and summary.endswith(".")
    assert "| digits_trades | 80.5-90: below by 0.50 |  | 58-59.75: above by 0.25 | MISSED |" in table.splitlines()
