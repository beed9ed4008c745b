"""Tables print percent, mark test-selected numbers and never print a number for a failed run."""

from __future__ import annotations

import torch

from flatrock.core.records import Result
from flatrock.reports.table import comparison, percent


def result(*, clean: list[int], marks: tuple[str, ...] = (), **attacks: list[int]) -> Result:
    flags = {"clean": clean, **attacks}
    return Result({"norm": "linf", "eps": 0.1}, {k: torch.tensor(v).bool() for k, v in flags.items()}, marks=marks)


def test_worst_case_is_per_sample() -> None:
    table = comparison({"a": result(clean=[1, 1, 1, 0], pgd=[1, 0, 1, 0], cw=[0, 1, 1, 0])})
    assert table.header == ("model", "clean", "pgd", "cw", "worst case")
    assert table.rows == (("a", "75.00", "50.00", "50.00", "25.00"),)


def test_failed_run_has_no_number() -> None:
    table = comparison({"good": result(clean=[1], pgd=[1]), "bad": "the loss became non-finite"})
    assert table.rows[1] == ("bad", "FAILED", "", "")


def test_test_selected_numbers_are_marked() -> None:
    table = comparison({"a": result(clean=[1, 0], pgd=[1, 0], marks=("test-selected",))})
    assert table.rows[0] == ("a", "50.00*", "50.00*", "50.00*")


def test_missing_attack_leaves_an_empty_cell() -> None:
    table = comparison({"a": result(clean=[1], pgd=[1]), "b": result(clean=[1], cw=[0])})
    assert table.rows == (("a", "100.00", "100.00", "", "100.00"), ("b", "100.00", "", "0.00", "0.00"))


def test_percent_of_nothing_is_nothing() -> None:
    assert (percent(None), percent(0.51234)) == ("", "51.23")
