"""Tables print percent, mark test-selected numbers and never print a number for a failed run."""

from __future__ import annotations

import pytest
import torch

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.records import Result
from flatrock.reports.table import comparison, distances, per_class, percent, worst_classes


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


# Class by class


def of_classes(labels: list[int], marks: tuple[str, ...] = ()) -> Result:
    flags = {"clean": [1, 1, 1, 0, 1], "pgd": [1, 0, 1, 0, 1], "p/a": [1, 1, 1, 0, 1], "p/b": [0, 1, 1, 0, 1]}
    return Result(
        {"norm": "linf", "eps": 0.1},
        {k: torch.tensor(v).bool() for k, v in flags.items()},
        plans={"p": ("p/a", "p/b")},
        labels=torch.tensor(labels),
        marks=marks,
    )


def test_a_row_per_class_and_one_of_all() -> None:
    table = per_class(of_classes([2, 0, 2, 0, 2]), ["cat", "dog", "2"])
    assert table.header == ("class", "samples", "clean", "pgd", "p", "worst case")
    assert table.rows == (
        ("0 cat", "2", "50.00", "0.00", "50.00", "0.00"),
        ("1 dog", "0", "", "", "", ""),
        ("2", "3", "100.00", "100.00", "66.67", "66.67"),
        ("all", "5", "80.00", "60.00", "60.00", "40.00"),
    )


def test_classes_without_names_are_numbers_up_to_the_last_seen() -> None:
    table = per_class(of_classes([3, 0, 3, 0, 3], marks=("test-selected",)))
    assert [row[:2] for row in table.rows] == [("0", "2"), ("1", "0"), ("2", "0"), ("3", "3"), ("all", "5")]
    assert table.rows[0][2:] == ("50.00*", "0.00*", "50.00*", "0.00*")
    assert table.rows[1][2:] == ("", "", "", "")


def test_classes_of_the_same_name_stay_apart() -> None:
    rows = per_class(of_classes([1, 0, 1, 0, 1]), ["all", "all"]).rows
    assert [row[:3] for row in rows] == [("0 all", "2", "50.00"), ("1 all", "3", "100.00"), ("all", "5", "80.00")]


def test_the_worst_classes_are_those_of_the_lowest_worst_case() -> None:
    assert worst_classes(of_classes([2, 0, 2, 0, 2])) == [0]
    assert worst_classes(of_classes([1, 2, 3, 3, 3])) == [1, 2]
    assert worst_classes(of_classes([4, 4, 4, 4, 4])) == [4]


def test_classes_need_labels_and_enough_names() -> None:
    with pytest.raises(StateError, match="the result has no labels"):
        per_class(result(clean=[1], pgd=[1]))
    with pytest.raises(StateError, match="the result has no labels"):
        worst_classes(result(clean=[1], pgd=[1]))
    with pytest.raises(ConfigError, match="there are 2 names for at least 3 classes; name them all"):
        per_class(of_classes([2, 0, 2, 0, 2]), ["cat", "dog"])
