"""What recipes expect, on the command line: verdicts of `reproduce` and `results`, and `flatrock bands`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command_cases import flatrock, refusal
from results_cases import fake_run

import flatrock as library
from flatrock.core.bands import measured_bands
from flatrock.core.records import COLLAPSED, Finding, Result
from flatrock.core.rows import read_rows
from flatrock.recipes.load import load_recipe
from flatrock.reports.expected import expected_parts
from flatrock.workflows.expected import expected_bands

CPU = ("--device", "cpu")
TINY = """\
base: digits_standard
about: {summary: a tiny one, bands: {clean: [CLEAN], fgsm: [0, 100]}}
train: {epochs: 3, batch_size: 64, tensorboard: false}
data: {limit: 512}
select: {size: 40}
evaluate: {attacks: [fgsm], batch_size: 100}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def expect(clean: str) -> None:
    Path("my.yaml").write_text(TINY.replace("CLEAN", clean))


def test_a_table_ends_in_a_verdict(here: Path) -> None:
    """The bands of a file are those it has now, also of a row that was made before; an override drops them."""
    expect("0, 100")
    done = flatrock("reproduce", "my.yaml", *CPU)
    assert done.exit_code == 0, done.output
    assert "expected clean 0-100, fgsm 0-100: PASS\n" in done.output
    assert done.output.endswith("PASS: 1 of 1 rows as their recipes expect\n")
    assert "| my | 0-100: as expected | 0-100: as expected | PASS |" in Path("runs/reproduce.md").read_text()
    (row,) = read_rows(Path("runs/reproduce.json")) or []
    share = 100 * row.scores["best"].accuracy["clean"]
    expect("0, 1")
    done = flatrock("reproduce", "my.yaml", *CPU)
    assert done.exit_code == 4, "all rows are there, one is not as expected"
    assert "was done before" in done.output and f"above by {share - 1:.2f}" in done.output
    assert done.output.endswith("MISSED: 0 of 1 rows as their recipes expect\n")
    assert f"0-1: above by {share - 1:.2f} | 0-100: as expected | MISSED |" in Path("runs/reproduce.md").read_text()
    outcome = library.reproduce("my.yaml", device="cpu")
    assert [r.recipe for r in outcome.missed] == ["my"] and outcome.bands[outcome.rows[0].key]["clean"] == (0.0, 1.0)
    changed = flatrock("reproduce", "my.yaml", "train.epochs=4", *CPU)
    assert changed.exit_code == 0, changed.output
    assert "PASS" not in changed.output and "MISSED" not in changed.output


def test_a_row_that_failed_weighs_more_than_one_that_missed(here: Path) -> None:
    expect("0, 1")
    Path("bad.yaml").write_text("base: my\noptimizer: {lr: 1.0e+30}\n")
    done = flatrock("reproduce", "my.yaml", "bad.yaml", *CPU)
    assert done.exit_code == 1, done.output
    assert "MISSED: 0 of 1 rows as their recipes expect; 1 more" in done.output


def test_collected_rows(here: Path) -> None:
    bands = load_recipe("digits_at").about.bands
    middle = {name: round(sum(ends) / 2, 1) for name, ends in bands.items()}
    good = fake_run(here / "good", "digits_at", middle)
    bad = fake_run(here / "bad", "digits_at", middle | {"clean": 90.0}, overrides={"seed": 3})
    other = fake_run(here, "digits_at", middle, overrides={"train.epochs": 3})
    done = flatrock("results", good, bad, other, "--out", "rows.json")
    assert done.exit_code == 0, "a number is collected whatever it is"
    below = f"below by {bands['clean'][0] - 90:.2f}"
    assert below in done.output and done.output.count("as expected") == 2 * len(bands) - 1
    assert "MISSED: 1 of 2 rows as their recipes expect; 1 more, changed" in done.output
    alone = flatrock("results", other, "--out", "other.json")
    assert "as expected" not in alone.output and "PASS" not in alone.output


def test_a_copy_tells_what_is_expected_and_is_not_held_to_it(here: Path) -> None:
    assert flatrock("cp", "digits_at", "my.yaml").exit_code == 0
    text, about = Path("my.yaml").read_text(), load_recipe("digits_at").about
    assert text.startswith("# copied from digits_at; say here what it is\n")
    assert about.summary not in text, "which says nothing of what it becomes"
    assert f"# expect: {about.expected} (of digits_at)\n" in text
    copy = load_recipe("my.yaml").about
    assert (copy.bands, copy.expect) == ({}, f"{about.expected} (of digits_at)")
    assert f"# expect: {about.expected}\n" in flatrock("check", "digits_at").output


def test_a_copy_that_differs_says_nothing_of_what_it_was(here: Path) -> None:
    flatrock("cp", "digits_at", "my.yaml")
    said = load_recipe("my.yaml").about.expect
    assert said.endswith(" (of digits_at)")
    for same in ({"seed": 5}, {"evaluate.batch_size": 7}):
        assert load_recipe("my.yaml", same).about.expect == said
    for other in ({"train.epochs": 2}, {"threat.eps": 0.1}, {"evaluate.attacks": ["pgd-3"]}, {"data.limit": 300}):
        assert load_recipe("my.yaml", other).about.expect == "", other
    assert load_recipe("my.yaml", {"train.epochs": 2, "about.expect": "little"}).about.expect == "little"
    whole = Path("my.yaml").read_text()
    Path("my.yaml").write_text(whole.replace("seed: 0", "seed: 3"))
    assert load_recipe("my.yaml").about.expect == said
    shrunk = whole.replace("eps: 0.2", "eps: 0.1")
    assert shrunk != whole
    Path("my.yaml").write_text(shrunk)
    assert load_recipe("my.yaml").about.expect == ""
    mine = yaml.safe_load(shrunk)
    mine["about"]["expect"] = "clean 90, as seen here"
    Path("my.yaml").write_text(yaml.safe_dump(mine))
    assert load_recipe("my.yaml").about.expect == "clean 90, as seen here"


def test_words_about_numbers_go_with_them_where_there_are_no_bands() -> None:
    name = "cifar10_at_swa_vit_b"
    assert (about := load_recipe(name).about).expect and not about.bands
    assert load_recipe(name, {"seed": 4}).about.expect == about.expect
    assert load_recipe(name, {"threat.eps": "4/255"}).about.expect == ""


def test_bands_of_rows_are_printed_as_recipes_take_them(here: Path) -> None:
    runs = [
        fake_run(here / str(seed), "digits_at", {"clean": clean, "pgd-20": 51.0}, overrides={"seed": seed})
        for seed, clean in ((1, 80.0), (0, 82.0))
    ]
    assert flatrock("results", *runs, "--out", "rows.json").exit_code == 0
    Path("else.json").write_text("{}")
    done = flatrock("bands", "rows.json", "else.json")
    assert done.exit_code == 0, done.output
    left, line = done.output.splitlines()
    assert left.startswith("left out else.json") and line.endswith("  # seeds 0, 1")
    given = yaml.safe_load(line)
    assert {k: tuple(v) for k, v in given["digits_at"].items()} == measured_bands(read_rows(Path("rows.json")) or [])[
        "digits_at"
    ]
    Path("my.yaml").write_text(yaml.safe_dump({"base": "digits_at", "about": {"bands": given["digits_at"]}}))
    assert flatrock("check", "my.yaml").exit_code == 0


def test_no_bands_of_no_rows(here: Path) -> None:
    changed = fake_run(here, "digits_at", {"clean": 80.0}, overrides={"train.epochs": 3})
    flatrock("results", changed, "--out", "rows.json")
    why = "no band can be made of these rows; make others with `flatrock reproduce`: - changed: digits_at, seed 0"
    assert why in refusal(flatrock("bands", "rows.json"))
    assert "nowhere.json" in refusal(flatrock("bands", "nowhere.json"))


def collapse(run: Path) -> Path:
    """Its result says E15 from now on."""
    file = run / "result-best.json"
    result = Result.from_json(file.read_text())
    file.write_text(replace(result, findings=(Finding(COLLAPSED, "one answer", "train again"),)).to_json())
    return run


def test_rows_that_make_no_band_are_told_with_the_true_reason(here: Path) -> None:
    """Evaluated, finished, unchanged, and collapsed; others are not, each in its own way."""
    found = {"clean": 80.0, "pgd-20": 51.0}
    runs = [collapse(fake_run(here / str(s), "digits_at", found, overrides={"seed": s})) for s in (0, 1)]
    runs += [
        fake_run(here, "digits_trades_swa", found, average_collapsed=True),
        fake_run(here, "digits_trades", {}, status="failed"),
        fake_run(here, "digits_mart", {}),
    ]
    assert flatrock("results", *runs, "--out", "rows.json").exit_code == 0
    said = refusal(flatrock("bands", "rows.json"))
    assert "unchanged" not in said
    assert "- collapsed: digits_at, seed 0; digits_at, seed 1 " in said
    assert "- averaged weights collapsed, and plain ones make no band of those: digits_trades_swa, seed 0 " in said
    assert "- failed: digits_trades, seed 0 - not evaluated: digits_mart, seed 0" in said
    good = fake_run(here / "good", "digits_at", found, overrides={"seed": 2})
    assert flatrock("results", good, "--out", "rows.json", "--add").exit_code == 0
    done = flatrock("bands", "rows.json")
    assert done.exit_code == 0, done.output
    assert "left out digits_at, seed 0; digits_at, seed 1: collapsed\n" in done.output
    (line,) = (line for line in done.output.splitlines() if line.startswith("digits_at: "))
    assert line.endswith("  # seed 2")


def test_bands_of_averaged_weights_judge_no_plain_ones(here: Path) -> None:
    bands = load_recipe("digits_trades_swa").about.bands
    middle = {name: round(sum(ends) / 2, 1) for name, ends in bands.items()}
    good = fake_run(here / "good", "digits_trades_swa", middle, averages=True)
    bad = fake_run(here / "bad", "digits_trades_swa", middle, average_collapsed=True, overrides={"seed": 3})
    done = flatrock("results", good, bad, "--out", "rows.json")
    assert done.exit_code == 0, done.output
    told = "no band for plain weights, digits_trades_swa, seed 3: averaged weights collapsed, bands are of those"
    assert f"\n{told}\n" in done.output
    assert f"PASS: 1 of 1 rows as their recipes expect\n{told}\n" in done.output
    alone = flatrock("results", bad, "--out", "bad.json")
    assert told.replace(", seed 3", "") in alone.output and "PASS" not in alone.output and "MISSED" not in alone.output
    row = next(row for row in read_rows(Path("rows.json")) or [] if row.seed == 3)
    assert (row.main, row.stands_in, row.judged) == ("best", True, True)
    assert not row.comparable, "nor is it set beside figures of averaged weights"
    assert expected_bands([row]) == {}
    rows = read_rows(Path("rows.json")) or []
    assert measured_bands(rows) == measured_bands([r for r in rows if r.seed == 0])
    page = "\n".join(expected_parts(["a", "b"], rows, expected_bands(rows)))
    assert f"{told.replace('digits_trades_swa, seed 3', 'b')}." in page
