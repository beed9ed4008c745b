"""A line per sample: the file is read back and every cell compared."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flatrock.core.errors import StateError
from flatrock.core.records import Result
from flatrock.reports.samples import write_samples


def a_result() -> Result:
    flags = {"clean": [1, 1, 0], "p/a": [1, 1, 0], "p/b": [0, 1, 0], "mine, strong": [1, 0, 0]}
    return Result(
        {"norm": "linf", "eps": 0.1},
        {k: torch.tensor(v).bool() for k, v in flags.items()},
        plans={"p": ("p/a", "p/b")},
        predictions=torch.tensor([4, 0, 2]),
        labels=torch.tensor([4, 0, 3]),
        margins={"clean": torch.tensor([1.5, 0.25, -0.75]), "worst": torch.tensor([-0.1, -2.0, -0.75])},
        ids=torch.tensor([12, 5, 9]),
    )


def read(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_every_cell(tmp_path: Path) -> None:
    path = tmp_path / "new" / "samples.csv"
    assert write_samples(a_result(), path) == path
    who = ["id", "label", "prediction", "clean_margin", "worst_margin"]
    assert read(path) == [
        [*who, "clean", "p/a", "p/b", "mine, strong", "p", "worst_case"],
        ["12", "4", "4", "1.5", "-0.1", "1", "1", "0", "1", "0", "0"],
        ["5", "0", "0", "0.25", "-2.0", "1", "1", "1", "0", "1", "0"],
        ["9", "3", "2", "-0.75", "-0.75", "0", "0", "0", "0", "0", "0"],
    ]
    assert path.read_bytes().count(b"\r") == 0
    assert [p.name for p in path.parent.iterdir()] == ["samples.csv"]


def test_the_means_of_columns_are_the_accuracies(tmp_path: Path) -> None:
    result = Result.from_json(a_result().to_json())
    header, *rows = read(write_samples(result, tmp_path / "a.csv"))
    means = {name: sum(int(row[i]) for row in rows) / 3 for i, name in enumerate(header) if i >= 5}
    assert (means["clean"], means["worst_case"]) == (result.clean, result.robust)
    assert {name: means[name] for name in result.per_attack} == result.per_attack


def test_what_is_not_known_is_empty_and_places_are_rows(tmp_path: Path) -> None:
    bare = replace(a_result(), predictions=None, margins={}, ids=None)
    rows = read(write_samples(bare, tmp_path / "a.csv"))
    assert [row[:6] for row in rows[1:]] == [
        ["0", "4", "", "", "", "1"],
        ["1", "0", "", "", "", "1"],
        ["2", "3", "", "", "", "0"],
    ]


def test_without_labels_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        StateError, match="the result has no labels, which a table of its samples needs; evaluate again"
    ):
        write_samples(replace(a_result(), labels=None), tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []
