"""`runs/*` of every command that takes runs: what flatrock itself wrote beside them is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_cases import wide as flatrock
from results_cases import fake_run

from flatrock.core.files import json_text

AT, TRADES = {"clean": 81.0, "pgd-20": 50.0}, {"clean": 80.0, "pgd-20": 52.1}
KINDS = ("overfit", "landscape", "curvature", "certificate", "bench")
Command = Callable[[Path], list[object]]
COMMANDS: list[Command] = [
    lambda runs: ["results", *sorted(runs.iterdir()), "--csv", runs.parent / "a.csv"],
    lambda runs: ["results", *sorted(runs.iterdir()), "--out", runs.parent / "rows.json"],
    lambda runs: ["page", *sorted(runs.iterdir()), "--out", runs.parent / "a.html"],
    lambda runs: ["compare", *sorted(runs.iterdir())],
    lambda runs: ["status", *sorted(runs.iterdir())],
]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=["csv", "rows", "page", "compare", "status"])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs and what a study of them left beside them."""
    for name, percents in (("cifar10_short_at", AT), ("cifar10_short_trades", TRADES)):
        fake_run(tmp_path / "runs", name, percents)
    for kind in KINDS:
        (tmp_path / "runs" / f"{kind}.json").write_text(json_text({"schema": f"flatrock.{kind}/1"}))
    for ending in ("png", "svg", "csv", "tsv", "html"):
        (tmp_path / "runs" / f"drawn.{ending}").write_text("drawn")
    return tmp_path / "runs"


@each_command
def test_what_flatrock_wrote_beside_runs_is_left_out_and_told(command: Command, runs: Path) -> None:
    done = flatrock(*command(runs))
    assert done.exit_code == 0, done.output
    assert done.output.count("left out ") == len(KINDS) + 5
    assert f"left out {runs / 'overfit.json'}: no result file, but a flatrock.overfit/1" in done.output


@each_command
@pytest.mark.parametrize("content", ['{"schema": "mine/1"}', "[1]", "{", '{"schema": "flatrock.result/1"}'])
def test_what_is_not_of_flatrock_or_damaged_stays_an_error(command: Command, runs: Path, content: str) -> None:
    (runs / "mine.json").write_text(content)
    done = flatrock(*command(runs))
    assert done.exit_code == 2, done.output
    assert "mine.json" in done.output.splitlines()[-1]


def test_where_nothing_else_is_named_it_is_refused(runs: Path) -> None:
    for name in ("page", "compare", "status"):
        done = flatrock(name, runs / "overfit.json")
        assert done.exit_code == 2, done.output
        assert "left out" not in done.output and "overfit.json" in done.output


def test_rows_are_compared_and_make_no_page(runs: Path) -> None:
    rows = runs / "rows.json"
    assert flatrock("results", runs / "cifar10_short_trades", "--out", rows).exit_code == 0
    assert "+2.10 ± 0.45 !" in flatrock("compare", runs / "cifar10_short_at", rows).output
    done = flatrock("page", runs / "cifar10_short_at", rows)
    assert done.exit_code == 0, done.output
    assert f"left out {rows}: it holds rows of many runs" in done.output


def test_a_study_leaves_out_what_it_wrote_the_last_time(runs: Path) -> None:
    done = flatrock("overfit", *sorted(runs.iterdir()))
    assert f"left out {runs / 'overfit.json'}" in done.output
    assert "keeps no" in done.output.splitlines()[-1], "what is wrong is said of a run, which kept no epochs"


@each_command
def test_a_folder_of_runs_among_runs_is_no_run(command: Command, runs: Path) -> None:
    """Where `flatrock sweep` puts its runs unless told."""
    fake_run(runs / "my-sweep", "cifar10_short_mart", AT)
    done = flatrock(*command(runs))
    assert done.exit_code == 0, done.output
    left_out = f"left out {runs / 'my-sweep'}: no run folder" in done.output
    assert left_out != (command(runs)[0] == "status"), "which searches it for runs"


@each_command
def test_a_folder_without_a_run_is_an_error_alone(command: Command, tmp_path: Path) -> None:
    fake_run(tmp_path / "runs" / "my-sweep", "cifar10_short_mart", AT)
    done = flatrock(*command(tmp_path / "runs"))
    if command(tmp_path / "runs")[0] != "status":
        assert done.exit_code == 2, done.output
        assert "no run.json" in done.output and "left out" not in done.output
