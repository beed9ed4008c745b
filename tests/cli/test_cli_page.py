"""`flatrock page`, driven as a user drives it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from command_cases import wide as flatrock
from results_cases import fake_result, fake_run

from flatrock.engine.folder import RunFolder

AT, TRADES = {"clean": 81.0, "pgd-20": 50.0}, {"clean": 80.0, "pgd-20": 52.1}


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


def test_one_that_was_asked_something_else_does_not_end_the_comparison_of_others(runs: list[Path]) -> None:
    mart = fake_run(runs[0].parent, "cifar10_short_mart", {"clean": 79.0, "pgd-20": 53.0})
    for name, about, eps in (("weak", {}, 4 / 255), ("mnist", {"data": "mnist test, 9 of 9 samples"}, 8 / 255)):
        other = replace(fake_result("cifar10_short_at", name, 2, TRADES, **about), threat={"norm": "linf", "eps": eps})
        (runs[0].parent / f"{name}.json").write_text(other.to_json())
    done = flatrock("page", runs[0], *(runs[0].parent / f"{name}.json" for name in ("weak", "mnist")), runs[1], mart)
    assert done.exit_code == 0, done.output
    page = (runs[0].parent / "page.html").read_text()
    assert "<td>+2.10 ± 0.45 !</td>" in page and "<td>+3.00 ± 0.54 !</td>" in page
    told = [line.partition("</p>")[0] for line in page.split("Not compared: ")[1:]]
    assert len(told) == 2
    assert told[0].startswith("cifar10_short_at weak: ") and "linf eps 0.0313725 and linf eps 0.0156863" in told[0]
    assert told[1].startswith("cifar10_short_at mnist: ") and "mnist test" in told[1]
    assert "<th>threat</th>" in page and "<th>data</th>" in page
    assert "linf eps 4/255" in page.partition("Reasons for doubt")[0], "the threat stands in the overview"


def test_what_is_alike_has_no_column(runs: list[Path]) -> None:
    assert flatrock("page", *runs).exit_code == 0
    page = (runs[0].parent / "page.html").read_text()
    assert "<th>threat</th>" not in page and "<th>data</th>" not in page


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
