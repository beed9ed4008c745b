"""The table of several checkpoints: the best under each measure, clean of the best PGD-20, collapsed ones left out."""

from __future__ import annotations

from dataclasses import replace

from results_cases import fake_result

from flatrock.core.records import COLLAPSED, Finding, Result
from flatrock.reports.checkpoints import Found, checkpoint_table, chosen_by


def one(clean: float, **attacks: float) -> Result:
    found = {"clean": clean, **{name.replace("_", "-"): value for name, value in attacks.items()}}
    return replace(fake_result("digits_at", "best", 2, found), findings=())


def collapsed(result: Result) -> Result:
    return replace(result, findings=(Finding(COLLAPSED, "one answer", "train again"),))


FOUND: dict[str, Found] = {
    "epoch-0100": [("", one(80, pgd_20=52, cw_20=50, autoattack=47)), ("0.031", one(80, pgd_20=53))],
    "epoch-0105": [("", one(83, pgd_20=53, cw_20=49, autoattack=46)), ("0.031", one(83, pgd_20=52.5))],
    "epoch-0110": [("", one(82, pgd_20=51, cw_20=51, autoattack=46.5)), ("0.031", one(82, pgd_20=52))],
}


def test_each_number_may_be_of_another_checkpoint() -> None:
    table = checkpoint_table(FOUND)
    assert table.header == ("checkpoint", "clean", "pgd-20", "cw-20", "autoattack", "pgd-20@0.031", "worst case")
    assert table.rows[0] == ("epoch-0100", "80.00", "52.00", "50.00", "47.00", "53.00", "47.00")
    assert table.rows[-1] == ("best of each*", "83.00*", "53.00*", "51.00*", "47.00*", "53.00*", "47.00*")
    assert chosen_by(FOUND) == ("epoch-0105", "pgd-20")


def test_what_collapsed_is_never_the_best() -> None:
    high = one(99, pgd_20=99, cw_20=99, autoattack=99)
    table = checkpoint_table({"epoch-0001": [("", collapsed(high))], **FOUND})
    assert table.rows[0][:2] == ("epoch-0001 COLLAPSED", "99.00")
    assert table.rows[-1] == checkpoint_table(FOUND).rows[-1]
    alone = checkpoint_table({"epoch-0001": [("", collapsed(high))]})
    assert alone.rows[-1][1] == "99.00*", "if all did, there is nothing else to show"


def test_without_pgd_20_another_attack_decides() -> None:
    assert chosen_by({"a": [("", one(80, cw_20=50, pgd_50=40))], "b": [("", one(81, cw_20=40, pgd_50=41))]}) == (
        "b",
        "pgd-50",
    )
    assert chosen_by({"a": [("", one(80, cw_20=50))], "b": [("", one(81, cw_20=40))]}) == ("a", "cw-20")
    both = {"a": [("", one(80, cw_20=50, pgd_20=50))], "b": [("", one(81, cw_20=40))]}
    assert chosen_by(both) == ("a", "cw-20"), "one that all were asked"


def test_marks_of_a_checkpoint_stay() -> None:
    marked = replace(one(80, pgd_20=50), marks=("test-selected",))
    assert checkpoint_table({"best": [("", marked)], "last": [("", one(81, pgd_20=49))]}).rows == (
        ("best", "80.00*", "50.00*", "50.00*"),
        ("last", "81.00", "49.00", "49.00"),
        ("best of each*", "80.00*", "50.00*", "50.00*"),
    )
