"""What a page says about rows beside their numbers: notes, changes told once, columns of other attacks, collapses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command_cases import flatrock
from results_cases import fake_run

from flatrock.core.provenance import NO_COMMIT
from flatrock.core.records import read_result
from flatrock.engine.folder import RunFolder
from flatrock.reports.papers import OWN as PAPERS
from flatrock.reports.papers import read_papers
from flatrock.reports.remarks import told_once

FOUND = {"clean": 80.0, "pgd-20": 51.0, "cw-20": 49.0, "autoattack": 48.0}


def reported(folder: Path, *runs: Path) -> tuple[str, str]:
    """The page of these runs, and what the command said."""
    file, page = folder / "rows.json", folder / "page.md"
    done = flatrock("results", *runs, "--out", file)
    assert done.exit_code == 0, done.output
    done = flatrock("report", file, "--out", page)
    assert done.exit_code == 0, done.output
    return page.read_text(), " ".join(done.output.split())


def test_where_rows_come_from_is_a_sentence_or_a_list(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, f"cifar10_short_{name}", FOUND) for name in ("at", "alp", "mart")]
    page, _ = reported(tmp_path, *runs)
    assert [line for line in page.splitlines() if line.startswith("Trained at commit ")], "of one origin"
    run = RunFolder(runs[1])
    run.write_info(provenance={**run.read_info()["provenance"], "commit": "0ther"})
    lines = reported(tmp_path, *runs)[0].splitlines()
    where = lines.index("Trained at")
    assert lines[where + 1] == lines[where + 4] == ""
    assert lines[where + 2].endswith("(`cifar10_short_at`, `cifar10_short_mart`)")
    assert lines[where + 3].startswith("- commit 0ther, ") and lines[where + 3].endswith("(`cifar10_short_alp`)")
    assert lines[where + 5].startswith("Times are ")


def test_an_installed_copy_is_told_by_its_version(tmp_path: Path) -> None:
    run = fake_run(tmp_path, "cifar10_short_at", FOUND)
    folder = RunFolder(run)
    folder.write_info(provenance={**folder.read_info()["provenance"], "commit": NO_COMMIT, "flatrock": "1.2.3"})
    (line,) = [line for line in reported(tmp_path, run)[0].splitlines() if line.startswith("Trained at ")]
    assert line.startswith("Trained at an unknown commit of flatrock 1.2.3, torch ")


def test_what_a_run_was_continued_with_is_told(tmp_path: Path) -> None:
    engine = {"precision": "bfloat16", "compile": True, "twin": True}
    reference = {"precision": "float32", "compile": False, "twin": False}
    went_on = [
        {"engine": {**engine, "precision": "float32"}},
        {"engine": reference, "device": "cpu"},
        {"device": "H100"},
    ]
    path = fake_run(tmp_path, "cifar10_short_at", FOUND, resumed=[{"commit": "fff", **again} for again in went_on])
    page, _ = reported(tmp_path, path)
    (line,) = [line for line in page.splitlines() if line.startswith("Trained at commit ")]
    assert "precision bfloat16, twin True, continued with precision float32, continued on cpu with" in line
    assert "on cpu with compile False and precision float32 and twin False, continued on H100 (`cifar10_" in line


def test_notes_beside_the_file_are_on_the_page_once(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, name, FOUND) for name in ("cifar10_short_at", "cifar10_short_alp", "digits_at")]
    plain, said = reported(tmp_path, *runs)
    assert "shared a GPU" not in plain and "left out" not in said
    notes = {"cifar10_short_at": "shared a GPU.", "cifar10_short_alp": "shared a GPU", "digits_at": "x", "gone": "y"}
    (tmp_path / "notes.yaml").write_text(yaml.safe_dump(notes))
    page, said = reported(tmp_path, *runs)
    assert {"- all 2 rows: shared a GPU.", "- digits_at: x."} <= set(page.splitlines())
    assert page.count("shared a GPU") == 1
    assert "left out the note on gone: there is no such row" in said


def test_a_note_may_be_of_one_seed(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / s, "cifar10_short_at", FOUND, overrides={"seed": int(s)}) for s in "01"]
    (tmp_path / "notes.yaml").write_text("cifar10_short_at: {text: two at once., seed: 1, shared: [training]}")
    page, _ = reported(tmp_path, *runs)
    assert "- AT (seed 1): two at once." in page.splitlines()
    assert sorted(line.split(" | ")[3] for line in page.splitlines() if "(2)" in line) == ["(7.00)", "7.00"]


def test_times_of_a_shared_gpu_are_in_brackets(tmp_path: Path) -> None:
    """As its records tell, or a note; and those of the others are not."""
    runs = [fake_run(tmp_path, f"cifar10_short_{name}", FOUND) for name in ("at", "alp", "mart", "trades")]
    for path, seen in ((runs[0], (0, 1, 2)), (runs[3], (0, 1, 0))):
        run = RunFolder(path)
        run.rewrite([replace(r, neighbours=n) for r, n in zip(run.run().records, seen, strict=True)])
    (tmp_path / "notes.yaml").write_text("cifar10_short_alp: {text: two at once., shared: [training]}")
    page, _ = reported(tmp_path, *runs)
    times = {line.split(" | ")[0]: line.split(" | ")[3:6] for line in page.splitlines() if "(2)" in line}
    assert times["| AT"] == times["| ALP"] == ["(7.00)", "(1.2)", "(2.5)"]
    assert times["| MART"] == ["7.00", "1.2", "2.5"]
    assert times["| TRADES"] == ["7.00", "(1.2)", "(2.5)"], "one of three epochs does not move the median"
    assert "- ALP (seed 0): two at once." in page.splitlines()
    assert page.count("Those in brackets may be longer for other processes that had the same GPU open.") == 1
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["training"]["shared_epochs"] == 2
    page, _ = reported(tmp_path, runs[2])
    assert "brackets" not in page


@pytest.mark.parametrize("name", ["result-best.json", "result-best-further1.json"])
def test_minutes_of_an_evaluation_beside_others_are_in_brackets(tmp_path: Path, name: str) -> None:
    """A further one counts: its minutes are in the sum."""
    recipes = ("cifar10_trades_linf", "cifar10_trades_awp_linf")
    runs = [fake_run(tmp_path, recipe, FOUND) for recipe in recipes]
    (tmp_path / "notes.yaml").write_text("cifar10_trades_awp_linf: {text: beside others., shared: [evaluation]}")
    page, _ = reported(tmp_path, *runs)
    assert [line.split(" | ")[5:] for line in page.splitlines() if "(2)" in line] == [
        ["2.5", "not recorded", "3.5 |"],
        ["2.5", "not recorded", "(3.0) |"],
    ]
    (tmp_path / "notes.yaml").unlink()
    file = runs[0] / name
    result = read_result(file)
    file.write_text(replace(result, provenance={**result.provenance, "neighbours": 1}).to_json())
    page, _ = reported(tmp_path, *runs)
    times = [line.split(" | ")[5:] for line in page.splitlines() if "(2)" in line]
    assert times == [["2.5", "not recorded", "(3.5) |"], ["2.5", "not recorded", "3.0 |"]]
    assert page.count("Those in brackets may be longer for other processes that had the same GPU open.") == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("digits_at: 3", "not a text"),
        ("- digits_at", "AttributeError"),
        ("digits_at: {shared: [training]}", "not a text, nor text:"),
        ("digits_at: {text: two at once, shared: [sleep]}", "a list of training and evaluation"),
        ("digits_at: {text: two at once, shared: training}", "a list of training and evaluation"),
        ("digits_at: {text: two at once, time: shared}", "has 'time'"),
        ("digits_at: {text: two at once, seed: all}", "not a whole number"),
    ],
)
def test_faults_of_notes_are_named(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "rows.json"
    assert flatrock("results", fake_run(tmp_path, "digits_at", FOUND), "--out", file).exit_code == 0
    (tmp_path / "notes.yaml").write_text(text)
    done = flatrock("report", file, "--out", tmp_path / "page.md")
    assert done.exit_code == 2
    assert "notes.yaml" in done.output and fault in " ".join(done.output.split())
    assert not (tmp_path / "page.md").exists()
    done = flatrock("reproduce", "digits_at", "--runs-dir", tmp_path / "runs", "--out", file)
    assert done.exit_code == 2 and fault in " ".join(done.output.split()), "before any work"
    assert not (tmp_path / "runs" / "digits_at").exists()


def test_what_comes_with_flatrock_says_nothing_about_runs_of_one_machine() -> None:
    """It is printed beside everybody's rows."""
    for part in read_papers(PAPERS).protocols.values():
        assert "GPU" not in part.text


def test_what_is_said_of_all_rows_names_none() -> None:
    said = {"one": ["a"], "both": ["a", "b"], "twice the same": ["a", "a"], "checkpoints": ["a best", "a last"]}
    assert told_once(said, ["a", "b"]) == [
        ("a", "one"),
        ("all 2 rows", "both"),
        ("a", "twice the same"),
        ("a best, a last", "checkpoints"),
    ]
    assert told_once({"alone": ["a"]}, ["a"]) == [("a", "alone")]


def test_changes_of_all_rows_are_one_line(tmp_path: Path) -> None:
    changes = {"train.epochs": 3, "train.batch_size": 64}
    names = ("cifar10_short_at", "cifar10_short_alp")
    runs = [fake_run(tmp_path, name, FOUND, overrides=changes) for name in names]
    page, _ = reported(tmp_path, *runs)
    changed = "changed, train.batch_size: 64 instead of 128; train.epochs: 3 instead of 30; not compared"
    assert f"- all 2 rows: {changed}." in page.splitlines()
    done = flatrock("results", *runs, "--out", tmp_path / "rows.json")
    assert "changed all 2 rows: train.batch_size: 64 instead of 128; " in " ".join(done.output.split())


def test_other_attacks_have_columns_of_their_own(tmp_path: Path) -> None:
    other = fake_run(tmp_path, "cifar10_short_alp", {"clean": 70.0, "fgsm": 60.0, "pgd-7": 55.0})
    page, _ = reported(tmp_path, fake_run(tmp_path, "cifar10_short_at", FOUND), other)
    lines = page.splitlines()
    assert "| method | recipe | seed | epoch | clean | PGD-20 | CW-20 | AutoAttack | fgsm | pgd-7 |" in lines
    assert "| AT | `cifar10_short_at` | 0 | best, 2 | 80.00 | 51.00 | 49.00 | 48.00 |  |  |" in lines
    assert "| ALP | `cifar10_short_alp` | 0 | best, 2 | 70.00 |  |  |  | 60.00 | 55.00 |" in lines


def test_a_collapsed_model_has_no_number_without_that_word(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path, name, FOUND) for name in ("cifar10_short_at", "digits_at", "digits_mart")]
    for run in runs[:2]:
        file = run / "result-best.json"
        result = json.loads(file.read_text())
        result["findings"].append({"code": "E15", "message": "one answer to everything", "cure": "train again"})
        file.write_text(json.dumps(result))
    alp = fake_run(tmp_path, "cifar10_short_alp", FOUND)
    page, _ = reported(tmp_path, *runs, alp)
    assert "| AT | `cifar10_short_at` | 0 | best, 2 COLLAPSED | 80.00 |" in page
    assert "ALP - AT" not in page and "| AT | AWP" not in page, "nothing is compared with it"
    assert "| digits_at COLLAPSED | 80.00 |" in page
    assert "| digits_mart | 80.00 |" in page
    done = flatrock("compare", runs[2], runs[1])
    said = " ".join(done.output.split())
    assert done.exit_code == 0 and "digits_at COLLAPSED" in said and "differences from it say nothing" in said
    done = flatrock("compare", runs[2], f"{tmp_path / 'rows.json'}:digits_at")
    assert done.exit_code == 2 and "not evaluated or collapsed" in " ".join(done.output.split())


@pytest.mark.parametrize("name", ["cifar10_short_trades", "digits_trades"])
def test_findings_name_the_rows_of_the_table_above_also_in_a_sweep(tmp_path: Path, name: str) -> None:
    """Two settings of one recipe and one seed, in a table of a protocol and in that of other runs."""
    runs = [fake_run(tmp_path / str(i), name, FOUND, overrides={"train.epochs": i}) for i in (2, 3)]
    result = json.loads((runs[1] / "result-best.json").read_text())
    result["findings"].append({"code": "E09", "message": "it is odd", "cure": "look"})
    (runs[1] / "result-best.json").write_text(json.dumps(result))
    info = RunFolder(runs[1])
    info.write_info(provenance={**info.read_info()["provenance"], "commit": "0ther"})
    lines = reported(tmp_path, *runs)[0].splitlines()
    (said,) = [line for line in lines if "E09" in line]
    label = "TRADES" if name == "cifar10_short_trades" else name
    assert said.startswith(f"- {label}, changed: train.epochs=3") and "train.epochs=2" not in said
    for epochs in (2, 3):
        rows = [line for line in lines if line.startswith(f"| {label}, changed: train.epochs={epochs} |")]
        assert len(rows) in (1, 2), "the tables call it so"
    (other,) = [line for line in lines if line.startswith("- commit 0ther")]
    assert f"({label}, changed: train.epochs=3" in other, "where it comes from, too"
