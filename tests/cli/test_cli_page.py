"""`flatrock page`, driven as a user drives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from results_cases import fake_result, fake_run
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.engine.folder import RunFolder

AT, TRADES = {"clean": 81.0, "pgd-20": 50.0}, {"clean": 80.0, "pgd-20": 52.1}


def flatrock(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    found = (("cifar10_short_at", AT), ("cifar10_short_trades", TRADES))
    return [fake_run(tmp_path / "runs", name, percents) for name, percents in found]


def test_one_run_has_its_page_in_its_folder_and_it_goes_with_the_run(runs: list[Path]) -> None:
    done = flatrock("page", runs[0])
    assert (done.exit_code, done.output) == (0, f"wrote {runs[0] / 'page.html'}\n")
    assert "cifar10_short_at" in (runs[0] / "page.html").read_text()
    assert flatrock("page", runs[0]).exit_code == 0, "a page of its own is replaced"
    RunFolder(runs[0]).clear()
    assert not (runs[0] / "page.html").exists()


def test_several_have_it_beside_them_with_their_differences(runs: list[Path]) -> None:
    done = flatrock("page", *runs, "--title", "A & B")
    assert done.exit_code == 0, done.output
    page = (runs[0].parent / "page.html").read_text()
    assert "<h1>A &amp; B</h1>" in page and "<title>A &amp; B</title>" in page
    compared = flatrock("compare", *runs).output
    assert "+2.10 ± 0.45 !" in compared
    assert "<th>minus cifar10_short_at</th>" in page and "<td>+2.10 ± 0.45 !</td>" in page
    assert "points ± standard error, paired by sample" in page


def test_what_cannot_be_compared_is_told(runs: list[Path], tmp_path: Path) -> None:
    other = fake_result("cifar10_short_trades", "best", 2, TRADES, data="mnist test, 1000 of 1000 samples")
    file = tmp_path / "other.json"
    file.write_text(other.to_json())
    done = flatrock("page", runs[0], file, "--out", tmp_path / "p.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "p.html").read_text()
    assert "Not compared: " in page and "mnist test" in page and "<th>minus" not in page


def test_a_run_without_results_stands_beside_others(runs: list[Path]) -> None:
    (runs[1] / "result-best.json").unlink()
    assert flatrock("page", *runs).exit_code == 0
    page = (runs[0].parent / "page.html").read_text()
    assert "Not evaluated: " in page and "Not compared" not in page


@pytest.mark.parametrize("name", ["page.md", "notes.html"])
def test_nothing_else_is_replaced(runs: list[Path], name: str) -> None:
    place = runs[0].parent / name
    place.write_text("my notes")
    done = flatrock("page", runs[0], "--out", place)
    assert done.exit_code == 2
    assert "must end in .html" in done.output or "is left alone" in done.output
    assert place.read_text() == "my notes"
