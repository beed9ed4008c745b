"""Bands: the rule by hand, what is within, and of which rows a band is made."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch

from flatrock.core.bands import band, band_text, bands_text, measured_bands, missed, off, outside
from flatrock.core.errors import StateError
from flatrock.core.rows import Row, Score


def score_of(n: int = 200, **right: int) -> Score:
    flags = {name.replace("_", "-"): torch.arange(n) < count for name, count in right.items()}
    return Score(epoch=3, right=flags, seconds={}, findings=(), marks=(), provenance={}, result="")


def row_of(seed: int, score: Score | None, *, recipe: str = "mine", changes: tuple[str, ...] = ()) -> Row:
    return Row(
        recipe=recipe,
        recipe_hash=f"{seed}",
        protocol="",
        summary="",
        changes=changes,
        seed=seed,
        status="finished",
        reason="",
        selection={},
        training={},
        findings=(),
        provenance={},
        scores={} if score is None else {"best": score},
    )


def test_the_rule_for_several_seeds_by_hand() -> None:
    # mean 0.6, s = 0.04 (variance 0.0016), p = (0.6 * 496 + 2) / 500 = 0.5992, e² = 0.5992 * 0.4008 / 496 = 0.000484192
    half = 2.575829 * sqrt((1 + 1 / 3) * (0.0016 + 0.000484192))  # 0.13579
    low, high = band([0.56, 0.60, 0.64], 496)
    assert (low, high) == (46.4, 73.6)
    assert low <= 60 - 100 * half < low + 0.1 and high - 0.1 < 60 + 100 * half <= high


def test_of_one_seed_the_error_of_the_test_set_is_taken_twice() -> None:
    # p = 0.5, e = sqrt(0.25 / 2496) = 0.010008: z sqrt(2 (e² + e²)) = 2 z e = 0.051558
    assert band([0.5], 2496) == (44.8, 55.2)


@pytest.mark.parametrize(("share", "end"), [(0.0, 0), (1.0, 1)])
def test_where_none_or_all_are_right_a_band_has_a_width_and_stays_among_percents(share: float, end: int) -> None:
    low, high = band([share] * 5, 500)
    assert (low, high)[end] == 100 * share
    assert 0.5 < high - low < 2, "not the width zero of p (1 - p)"


def test_more_seeds_make_a_band_narrower_and_more_spread_makes_it_wider() -> None:
    def width(shares: list[float], n: int = 500) -> float:
        low, high = band(shares, n)
        return high - low

    assert width([0.6] * 5) < width([0.6] * 2) < width([0.6])
    assert width([0.58, 0.62]) > width([0.6, 0.6])
    assert width([0.6] * 3, 10_000) < width([0.6] * 3, 500)


@pytest.mark.parametrize(
    ("share", "points"),
    [(0.60, 0.0), (0.70, 0.0), (0.65, 0.0), (0.5960, -0.4), (0.7001, 0.01), (0.70004, 0.0), (0.0, -60.0), (1.0, 30.0)],
)
def test_how_far_outside(share: float, points: float) -> None:
    """Both ends are within, and what counts is what tables print."""
    assert off(share, (60.0, 70.0)) == points


def test_a_row_is_judged_by_what_it_has() -> None:
    row = row_of(0, score_of(clean=190, pgd_20=100))
    bands = {"clean": (96.0, 99.0), "pgd-20": (40.0, 60.0), "autoattack": (1.0, 2.0)}
    assert outside(row, bands) == {"clean": -1.0, "pgd-20": 0.0}
    assert missed(row, bands) and not missed(row, {"pgd-20": (40.0, 60.0)}) and not missed(row, {})
    assert outside(row_of(0, None), bands) == {}


def test_bands_are_of_comparable_rows_and_of_what_all_of_them_measure() -> None:
    rows = [
        row_of(0, score_of(clean=190, pgd_20=100)),
        row_of(1, score_of(clean=194)),
        row_of(2, score_of(clean=10), changes=("train.epochs: 1 instead of 2",)),
        row_of(3, None),
        row_of(0, score_of(pgd_20=90, clean=180), recipe="other"),
    ]
    found = measured_bands(rows)
    assert found == {
        "mine": {"clean": band([0.95, 0.97], 200)},
        "other": {"clean": band([0.9], 200), "pgd-20": band([0.45], 200)},
    }
    assert list(found["other"]) == ["clean", "pgd-20"]
    assert measured_bands([rows[2], rows[3]]) == {}


def test_rows_that_do_not_belong_together_are_refused() -> None:
    row = row_of(0, score_of(clean=190))
    with pytest.raises(StateError, match="two rows of mine with one seed"):
        measured_bands([row, replace(row, recipe_hash="b", own=True)])
    with pytest.raises(StateError, match="test sets of different sizes"):
        measured_bands([row, row_of(1, score_of(n=100, clean=90))])


def test_words() -> None:
    assert band_text((97.5, 99.0)) == "97.5-99"
    assert bands_text({"clean": (97.5, 100.0), "pgd-20": (0.0, 1.7)}) == "clean 97.5-100, pgd-20 0-1.7"
