"""Settings minus the first: means over seeds by closed forms, one seed as `flatrock compare` has it."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
import torch
from results_cases import fake_run

from flatrock.core.gaps import Gap, student
from flatrock.core.rows import WORST, Row
from flatrock.reports.compare import difference_table as compared
from flatrock.reports.differences import LINES, Difference, difference_table, gaps_of
from flatrock.workflows.results import collect_run

N = 1000


@pytest.fixture
def row(tmp_path: Path) -> Row:
    return collect_run(fake_run(tmp_path, "cifar10_short_at", {"clean": 80.0, "pgd-20": 50.0}))


def with_right(row: Row, **right: int) -> Row:
    """The row with so many samples right, the first ones."""
    flags = {name: torch.arange(N) < count for name, count in right.items()}
    return replace(row, scores={"best": replace(row.scores["best"], right=flags, more=())})


def test_means_over_seeds_follow_from_the_differences_of_seeds_and_samples(row: Row) -> None:
    """Right on 60, 50 and 40 samples more, all of them the same ones: their shares are 1 for 40, 2/3 and 1/3 for 10."""
    base = with_right(row, clean=800, pgd=500)
    pairs = [(with_right(row, clean=800, pgd=500 + more), base) for more in (60, 50, 40)]
    means, by_seed = gaps_of(pairs)
    assert list(means) == ["clean", "pgd", WORST]
    assert [gap.mean for gap in by_seed["pgd"]] == pytest.approx([0.06, 0.05, 0.04])
    of_samples = sqrt((0.040 + 0.010 * (4 / 9 + 1 / 9) - 0.05**2) / N)
    of_seeds = 0.01 / sqrt(3)
    gap = means["pgd"]
    assert (gap.mean, gap.error) == pytest.approx((0.05, sqrt(of_samples**2 + of_seeds**2)))
    assert gap.reach * gap.error == pytest.approx(sqrt((2 * of_samples) ** 2 + (student(3) * of_seeds) ** 2))
    assert (means["clean"].mean, means["clean"].error, means["clean"].beyond_chance) == (0.0, 0.0, False)


def test_a_seed_alone_is_as_compare_has_it(row: Row) -> None:
    one, other = with_right(row, clean=830, pgd=520), with_right(row, clean=800, pgd=515)
    means, by_seed = gaps_of([(one, other)])
    table = difference_table(
        [Difference(values={"k": "2"}, base={"k": "1"}, wanted=1, seeds=(7,), gaps=means, by_seed=by_seed)]
    )
    assert table.header == ("k", "seeds", "clean", "pgd", WORST)
    scores = {name: row.scores["best"] for name, row in (("a", other), ("b", one))}
    (line,) = compared({name: {**score.right, WORST: score.worst} for name, score in scores.items()}).rows
    assert table.rows == (("2", "seed 7 alone", *line[1:]),) and line[1].endswith(" !")


def test_measures_that_not_all_rows_have_are_left_out(row: Row) -> None:
    pairs = [(with_right(row, clean=8, pgd=5, fgsm=6), with_right(row, clean=8, pgd=5)) for _ in range(2)]
    assert list(gaps_of(pairs)[0]) == ["clean", "pgd", WORST]
    assert list(gaps_of(pairs, [WORST, "pgd"])[0]) == ["clean"]
    assert gaps_of([]) == ({}, {})


def difference(name: str, *means: float, reach: float = 4.5, starred: bool = False, wanted: int = 3) -> Difference:
    gap = Gap(sum(means) / len(means), 0.01, N, reach)
    return Difference(
        values={"k": name},
        base={"k": "0"},
        wanted=wanted,
        seeds=tuple(range(len(means))),
        gaps={WORST: gap, "clean": gap},
        by_seed={name: tuple(Gap(mean, 0.0) for mean in means) for name in (WORST, "clean")},
        starred=starred,
    )


def test_a_line_for_each_seed_and_their_mean() -> None:
    """Three standard errors are not beyond the chance of few seeds."""
    table = difference_table(
        [difference("1", 0.02, 0.04), difference("2", -0.1, -0.1, -0.1, starred=True), Difference(
            values={"k": "3"}, base={"k": "0"}, wanted=3
        )]
    )  # fmt: skip
    assert table.rows == (
        ("1", "seed 0", "+2.00", "+2.00"),
        ("1", "seed 1", "+4.00", "+4.00"),
        ("1", "mean of 2 of 3", "+3.00 ± 1.00", "+3.00 ± 1.00"),
        *((("2", f"seed {seed}", "-10.00*", "-10.00*")) for seed in range(3)),
        ("2", "mean of 3", "-10.00 ± 1.00* !", "-10.00 ± 1.00* !"),
        ("3", "none of 3", "", ""),
    )


def test_many_lines_of_seeds_do_not_hide_the_means() -> None:
    many = [difference(str(number), 0.02, 0.04, 0.06) for number in range(LINES // 4 + 1)]
    assert len(difference_table(many[:-1]).rows) == LINES // 4 * 4
    assert [row[1] for row in difference_table(many).rows] == ["mean of 3"] * len(many)
