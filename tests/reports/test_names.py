"""Rows of results have names that tell them apart: changes, folders, hashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from results_cases import fake_run

from flatrock.core.rows import Row
from flatrock.reports.names import row_names
from flatrock.reports.results import overview
from flatrock.workflows.results import collect_run

FOUND = {"clean": 80.0, "pgd-20": 51.0}
NAME = "cifar10_short_trades"


def row(folder: Path, **overrides: Any) -> Row:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return collect_run(fake_run(folder, NAME, FOUND, overrides=given))


def test_rows_of_a_sweep_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    rows = [
        row(tmp_path / str(i), train__epochs=3, seed=seed, **swept)
        for i, (seed, swept) in enumerate(
            (seed, swept)
            for swept in ({"threat__eps": "4/255"}, {"objective__beta": 3}, {})
            for seed in (0, 1)
        )
    ]  # fmt: skip
    names = row_names(rows)
    assert names[0] == f"{NAME}, seed 0, changed: objective.beta=6, threat.eps=4/255"
    assert names[3] == f"{NAME}, seed 1, changed: objective.beta=3, threat.eps=8/255"
    assert names[4] == f"{NAME}, seed 0, changed: objective.beta=6, threat.eps=8/255", "the library's own values"
    assert len(set(names)) == 6
    assert [line[0] for line in overview(rows).rows] == names


def test_rows_alone_or_changed_alike_are_called_as_they_were(tmp_path: Path) -> None:
    alone = [row(tmp_path / "a", train__epochs=3), row(tmp_path / "b")]
    assert row_names(alone) == [f"{NAME}, changed", NAME]
    alike = [row(tmp_path / str(seed), train__epochs=3, seed=seed) for seed in (0, 1)]
    assert row_names(alike) == [f"{NAME}, seed 0, changed", f"{NAME}, seed 1, changed"]


def test_recipes_of_ones_own_are_told_apart_by_folder_or_hash(tmp_path: Path) -> None:
    rows = [row(tmp_path / str(n), name="mine", train__epochs=n) for n in (2, 3)]
    assert [r.own for r in rows] == [True, True]
    assert row_names(rows) == [f"{NAME} ({r.recipe_hash[:8]})" for r in rows]
    assert row_names(rows, {rows[0].key: "runs/two"}) == [f"{NAME} (runs/two)", f"{NAME} ({rows[1].recipe_hash[:8]})"]
    assert row_names(rows[:1], {rows[0].key: "runs/two"}) == [NAME]
