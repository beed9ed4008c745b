"""The table of a sweep: means of what may be averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results_cases import fake_run

from flatrock.core.rows import Row
from flatrock.reports.sweep import swept
from flatrock.workflows.results import collect_run


@dataclass(frozen=True)
class Setting:
    values: Mapping[str, str]
    rows: Sequence[Row]
    wanted: int = 2
    failed: Sequence[object] = ()


def row(folder: Path, **about: Any) -> Row:
    return collect_run(fake_run(folder, "cifar10_short_at_swa", {"clean": 80.0, "pgd-20": 50.0}, **about))


def test_averaged_and_plain_weights_have_no_mean(tmp_path: Path) -> None:
    averaged, plain = row(tmp_path / "a", averages=True), row(tmp_path / "b", average_collapsed=True)
    assert (averaged.main, plain.main, plain.stands_in) == ("average-best", "best", True)
    table = swept([Setting({"k": "1"}, [averaged, plain]), Setting({"k": "2"}, [plain, plain])])
    assert table.header[:4] == ("k", "seeds", "clean", "pgd-20")
    assert table.rows[0][1:4] == ("2, 1 not averaged: no mean", "", "")
    assert table.rows[1][1:4] == ("2, 2 not averaged", "80.00 ± 0.00", "50.00 ± 0.00")
