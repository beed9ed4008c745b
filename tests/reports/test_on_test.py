"""Rows whose best epoch was chosen on the test set, as papers choose: compared with those, marked, never mixed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_cases import flatrock
from matplotlib.figure import Figure
from results_cases import fake_run

from flatrock.core.bands import unfit
from flatrock.core.errors import ConfigError
from flatrock.core.rows import Row, chosen_on_test
from flatrock.reports.claims import by_recipe, claims, outlook
from flatrock.reports.names import method_names, row_names
from flatrock.reports.papers import OWN, TABLES, read_papers, shipped_papers
from flatrock.reports.remarks import remarks
from flatrock.reports.results import measured, overview
from flatrock.reports.results_beside import beside
from flatrock.reports.results_figure import draw_results
from flatrock.workflows.expected import expected_bands
from flatrock.workflows.results import collect_run

PAPERS = shipped_papers()
ON_TEST = {"select.data": "test", "data.held_out": 0}
PGD, CW = "pgd-20:step_size=0.003", "cw-20:step_size=0.003"
AT, AWP = {"clean": 81.0, "pgd-20": 52.0}, {"clean": 80.6, "pgd-20": 54.5}


def row(
    folder: Path, name: str, found: Mapping[str, float], overrides: Mapping[str, Any] = ON_TEST, **more: Any
) -> Row:
    return collect_run(fake_run(folder, name, found, overrides=dict(overrides), **more))


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    """AT and AT + AWP, each held out and chosen on the test set."""
    found = {"cifar10_at_linf": AT, "cifar10_at_awp_linf": AWP}
    lower = {"clean": -1.0, "pgd-20": -0.5}
    made = [
        row(tmp_path / "held", name, {k: v + lower[k] for k, v in values.items()}, {}) for name, values in found.items()
    ]
    return made + [row(tmp_path / "test", name, values) for name, values in found.items()]


def test_exactly_this_change_is_the_published_way(tmp_path: Path) -> None:
    one = row(tmp_path / "a", "cifar10_at_linf", AT)
    assert one.changes == ("data.held_out: 0 instead of 1000", "select.data: 'test' instead of 'held_out'")
    assert one.on_test and not one.comparable and not one.judged
    for nth, other in enumerate(
        ({"select.data": "test"}, {**ON_TEST, "train.epochs": 3}, {**ON_TEST, "select.every": 2}, {})
    ):
        assert not row(tmp_path / str(nth), "cifar10_at_linf", AT, other).on_test
    assert row(tmp_path / "seed", "cifar10_at_linf", AT, {**ON_TEST, "seed": 4}).on_test, "the seed is free"
    assert not row(tmp_path / "failed", "cifar10_at_linf", AT, status="failed").on_test
    assert not row(tmp_path / "bare", "cifar10_at_linf", {}).on_test
    assert not row(tmp_path / "plain", "cifar10_short_at_swa", AT, average_collapsed=True).on_test
    assert not chosen_on_test(()) and not chosen_on_test(["data.held_out: 0 instead of 1000"])


def test_they_have_no_bands(tmp_path: Path) -> None:
    known = row(tmp_path, "digits_at", {"clean": 98.0, "pgd-20": 60.0})
    assert known.on_test and expected_bands([known]) == {} and unfit(known) == "changed"


def test_groups_are_never_mixed(rows: list[Row]) -> None:
    held, tested = by_recipe(rows), by_recipe(rows, on_test=True)
    assert held.keys() == tested.keys() == {"cifar10_at_linf", "cifar10_at_awp_linf"}
    assert all(not runs[0].changes for runs in held.values()) and all(runs[0].on_test for runs in tested.values())
    part = PAPERS.protocols["awp_table3"]
    only = [held["cifar10_at_linf"][0], tested["cifar10_at_awp_linf"][0]]
    assert claims(part, only) == claims(part, only, on_test=True) == [], "a baseline of the other kind is none"
    (told,) = [c for c in claims(part, rows, on_test=True) if "minus AT" in c.what]
    assert told.what == "AT + AWP (CIFAR-10 Linf)* minus AT (CIFAR-10 Linf)*"
    assert told.sentence(part).count("here: ") == 2 and "PGD-20 +2.60 there, +2.50 ± 0.49 here" in told.sentence(part)


def test_beside_papers_that_chose_so(rows: list[Row], tmp_path: Path) -> None:
    part = PAPERS.protocols["awp_table3"]
    table = beside(part, rows, on_test=True)
    best = [line for line in table.rows if "last epoch" not in line[1]]
    assert [line[0] for line in best] == ["AT (CIFAR-10 Linf)*", "AT + AWP (CIFAR-10 Linf)*"]
    assert best[0][2:5] == ("81.70 (-0.70)", "85.57", "52.79 (-0.79)")
    assert beside(part, rows).rows[0][2:5] == ("81.70 (-1.70)", "85.57", "52.79 (-1.29)"), "held out, as ever"
    gat = row(tmp_path, "cifar10_gat_linf", {"clean": 80.0, PGD: 50.0, CW: 49.0, "autoattack": 46.0})
    table8 = PAPERS.protocols["rat_table8"]
    assert beside(table8, [gat], on_test=True).rows == (), "how GAT was chosen is not known"
    assert outlook(table8, ["cifar10_gat_linf"], on_test=True) == ""
    assert "figures for 1 of the rows" in outlook(table8, ["cifar10_gat_linf"])


def test_numbers_and_names_are_marked(rows: list[Row]) -> None:
    part = PAPERS.protocols["awp_table3"]
    told = measured(rows, part).rows
    assert [line[0] for line in told] == [
        "AT (CIFAR-10 Linf)",
        "AT + AWP (CIFAR-10 Linf)",
        "AT (CIFAR-10 Linf)*",
        "AT + AWP (CIFAR-10 Linf)*",
    ]
    assert told[2][4:6] == ("81.00*", "52.00*") and told[0][4:6] == ("80.00", "51.50")
    assert row_names(rows)[2:] == ["cifar10_at_linf, select=test", "cifar10_at_awp_linf, select=test"]
    assert overview(rows).rows[2][1] == "81.00*"
    said = "\n".join(remarks(rows, method_names(rows, {}), {}))
    assert "chosen on the test set, no images held out; compared with papers that chose so, marked `*`" in said
    assert "not compared" not in said


def test_the_page_has_both_apart(rows: list[Row], tmp_path: Path) -> None:
    runs = [tmp_path / kind / name for kind in ("held", "test") for name in ("cifar10_at_linf", "cifar10_at_awp_linf")]
    done = flatrock("results", *runs, "--out", tmp_path / "rows.json")
    assert done.exit_code == 0, done.output
    assert "test-selected cifar10_at_linf, cifar10_at_awp_linf: best epoch chosen" in " ".join(done.output.split())
    assert flatrock("report", tmp_path / "rows.json", "--out", tmp_path / "page.md").exit_code == 0
    page = (tmp_path / "page.md").read_text()
    held, _, tested = page.partition("Rows whose best epoch was chosen on the test set, as most papers choose it (`*`)")
    assert "| AT + AWP (CIFAR-10 Linf) - AT (CIFAR-10 Linf) | +0.60 ± " not in tested
    assert "| AT + AWP (CIFAR-10 Linf)* - AT (CIFAR-10 Linf)* |" in tested
    assert "AT + AWP (CIFAR-10 Linf)* minus" not in held and "AT + AWP (CIFAR-10 Linf) minus" not in tested
    assert "`*` the epoch was chosen on the test set." in held


def test_reproduce_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("cifar10_full_at", "cifar10_full_at_awp")
    found = {"clean": 83.0, "pgd-20": 51.0, "cw-20": 50.5, "autoattack": 48.0}
    for name, gain in zip(names, (0.0, 2.5), strict=True):
        made = fake_run(
            Path("made"), name, {**found, "pgd-20": 51 + gain}, last={**found, "pgd-20": 44 + gain}, overrides=ON_TEST
        )
        made.rename(Path("made") / f"{name}-data.held_out=0-select.data=test")
    words = (*names, "select=test", "data.held_out=0", "--runs-dir", "made", "--device", "cpu")
    plan = " ".join(flatrock("reproduce", *words, "--dry-run").output.split())
    assert "2 of them choose their best epoch on the test set: compared, with a *, with papers that did" in plan
    assert "compared with no paper" not in plan
    assert "cifar10_full, chosen on the test set*: papers print figures for 2 of the rows, differences: 4" in plan
    done = " ".join(flatrock("reproduce", *words).output.split())
    assert "of the differences papers print, cifar10_full, chosen on the test set*:" in done
    assert "AT + AWP* minus AT*: PGD-20" in done and "nothing to be compared with" not in done
    alone = " ".join(flatrock("reproduce", "cifar10_full_at_awp", *words[2:], "--out", "one.json").output.split())
    assert "cifar10_full, chosen on the test set*, differences: name cifar10_full_at too for 2 more" in alone


def test_transfers_may_come_from_a_run_chosen_alike(tmp_path: Path) -> None:
    found = {"clean": 80.0, PGD: 50.0, CW: 49.0, "autoattack": 47.0}
    name = "cifar10_trades_awp_linf"
    one = row(tmp_path / "a", name, found)
    assert one.on_test and one.scores["best"].more[0].provenance["surrogate"]["recipe"] == "cifar10_at_linf"
    held = row(tmp_path / "b", name, found, {})
    assert held.comparable
    assert held.scores["best"].more[0].provenance["surrogate"] != one.scores["best"].more[0].provenance["surrogate"]


def test_they_are_drawn_with_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Figure] = []
    monkeypatch.setattr("flatrock.reports.results_figure.store", lambda figure, path: seen.append(figure))
    one = row(tmp_path, "cifar10_at_rat2_linf", {"clean": 83.0, PGD: 54.0, "autoattack": 48.0})
    draw_results([one], PAPERS.concerning({one.recipe: ""}), tmp_path / "x.png")
    told = [text.get_text().strip() for text in seen[0].axes[1].texts]
    assert any(line.startswith("1  AT + RAT*, 83.00 / 48.00") for line in told)
    assert any("AT + RAT, RAT (Jin et al. 2023) Table 8, 83.56 / 48.70" in line for line in told)


def test_sources_say_how_they_were_chosen(tmp_path: Path) -> None:
    """`chosen: test` stands exactly where the text says so."""
    for path in (OWN, *sorted(TABLES.glob("*.yaml"))):
        for key, source in yaml.safe_load(path.read_text())["sources"].items():
            said = "on the test set" in " ".join(source["differs"].split())
            assert said == (source.get("chosen") == "test"), key
    raw = yaml.safe_load(OWN.read_text())
    raw["sources"]["chen"]["chosen"] = "luck"
    (tmp_path / "papers.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match="has chosen on the 'test' set, or says nothing of it, got 'luck'"):
        read_papers(tmp_path / "papers.yaml")
