"""Tables print percent, mark test-selected numbers and never print a number for a failed run."""

from __future__ import annotations

import torch

from flatrock.core.records import Result
from flatrock.reports.table import comparison, distances, percent


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


def measured(**more: object) -> Result:
    flags = {"clean": [1, 1, 1, 0], "rays": [1, 0, 1, 0], "fab": [1, 1, 1, 0]}
    far = {"rays": [0.2, 0.05, float("inf"), 0.0], "fab": [float("inf")] * 3 + [0.0]}
    return Result(
        {"norm": "linf", "eps": 0.1},
        {k: torch.tensor(v).bool() for k, v in flags.items()},
        distances={k: torch.tensor(v, dtype=torch.float64) for k, v in far.items()},
        **more,  # type: ignore[arg-type]
    )


def test_distances_are_means_over_all_samples_that_have_one() -> None:
    costs = {"rays": {"samples": 3.0, "queries": 300.0}, "fab": {"samples": 0.0, "queries": 0.0}}
    table = distances(measured(attacks={"rays": {"kind": "RayS"}}, costs=costs))
    assert table.header == ("attack", "mean distance", "not found", "acc %", "queries")
    assert table.rows == (("rays (ADBD)", "0.08333", "1", "50.00", "100"), ("fab", "0", "3", "75.00", ""))


def test_distances_without_costs_and_without_any() -> None:
    assert [row[-1] for row in distances(measured()).rows] == ["", ""]
    assert distances(result(clean=[1], pgd=[1])).rows == ()
