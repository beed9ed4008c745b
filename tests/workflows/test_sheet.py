"""`flatrock results --csv`: a line for every result, whatever it was asked, and for every run that has none."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_cases import flatrock
from results_cases import N, fake_result, fake_run, standing

from flatrock.core.records import Finding, Result
from flatrock.core.rows import read_rows
from flatrock.engine.folder import RunFolder
from flatrock.workflows.results import collect_run
from flatrock.workflows.sheet import sheet
from flatrock.workflows.status import standing as standing_of

NAME = "cifar10_short_trades"
FOUND = {"clean": 80.0, "pgd-20": 53.0, "autoattack": 49.0}


def lines(file: Path) -> list[dict[str, str]]:
    with file.open() as stream:
        return list(csv.DictReader(stream))


def more(run: Path, name: str, percents: dict[str, float], *, of: str = "best", **about: Any) -> Result:
    """One more result of a run, asked otherwise."""
    owner = fake_result(NAME, of, 2, percents, whole_plan=False, **about)
    (run / name).write_text(owner.to_json())
    return owner


def test_every_result_of_a_sweep_has_a_line(tmp_path: Path) -> None:
    runs = [
        fake_run(tmp_path / f"{eps}", NAME, FOUND, overrides={"threat.eps": f"{eps}/255", "seed": seed})
        for eps, seed in ((4, 0), (8, 1))
    ]
    more(runs[1], "result-best-pgd-2-n1000-seed3.json", {"clean": 80.0, "pgd-2": 60.0}, recipe_hash="?", seed=3)
    done = flatrock("results", *runs, "--csv", tmp_path / "a.csv")
    assert done.exit_code == 0, done.output
    assert "3 lines with a result" in done.output and "not evaluated" not in done.output
    first, whole, own = lines(tmp_path / "a.csv")
    assert list(first)[:5] == ["run", "recipe", "changes", "threat.eps", "seed"], "what differs has a column"
    assert (first["run"], first["recipe"], first["seed"]) == (str(runs[0]), NAME, "0")
    assert float(first["threat.eps"]) == 4 / 255 and first["changes"].startswith("threat.eps: 0.0156")
    assert (whole["changes"], float(whole["threat.eps"]), whole["seed"]) == ("", 8 / 255, "1")
    assert (whole["which"], whole["epoch"], whole["n"], whole["norm"]) == ("best", "2", str(N), "linf")
    assert (whole["attacks"], whole["findings"], whole["stale"]) == ("pgd-20, autoattack", "E02", "0")
    assert [whole[k] for k in ("clean", "pgd-20", "autoattack", "worst_case")] == ["0.8", "0.53", "0.49", "0.49"]
    assert (own["pgd-2"], own["pgd-20"], own["attack_seed"], own["worst_case"]) == ("0.6", "", "3", "0.6")
    assert whole["pgd-2"] == "" and whole["file"] == str(runs[1] / "result-best.json")


def test_what_is_not_there_is_told_and_has_a_line(tmp_path: Path) -> None:
    bare, failed = fake_run(tmp_path / "a b", NAME, {}), fake_run(tmp_path / "c", NAME, FOUND, status="failed")
    (failed / "result-best.json").unlink()
    running = fake_run(tmp_path / "d", NAME, {}, status="running")
    done = flatrock("results", bare, failed, running, "--csv", tmp_path / "a.csv")
    assert done.exit_code == 0, done.output
    assert f"not evaluated {bare}; run `flatrock eval '{bare}'`, then this again" in done.output
    assert f"not finished {running} (its process is gone); train on with --resume" in done.output
    assert f"not evaluated {running}" not in done.output and f"not evaluated {failed}" not in done.output
    assert "0 lines with a result, and 3 without one (a run each)" in done.output
    found = lines(tmp_path / "a.csv")
    assert [line["status"] for line in found] == ["finished", "failed", "running"]
    assert [line["worst_case"] for line in found] == [""] * 3


@pytest.mark.parametrize("to", ["--csv", "--out"])
def test_the_cure_is_one_that_works_where_weights_collapsed(tmp_path: Path, to: str) -> None:
    """`flatrock eval RUN` refuses a run whose averages all collapsed; where all weights did nothing can be taken."""
    swa = fake_run(tmp_path / "a", "cifar10_short_at_swa", {}, average_collapsed=True)
    whole = fake_run(tmp_path / "b", "cifar10_short_trades_swa", {}, averages=True)
    lost = fake_run(tmp_path / "c", NAME, {})
    folder = RunFolder(lost)
    folder.rewrite([replace(record, best_epoch=None) for record in folder.records()])
    done = flatrock("results", swa, whole, lost, to, tmp_path / f"a.{'csv' if to == '--csv' else 'json'}")
    assert done.exit_code == 0, done.output
    assert f"not evaluated {swa}; run `flatrock eval {swa} --which best`, then this again" in done.output
    assert f"not evaluated {whole}; run `flatrock eval {whole}`, then this again" in done.output
    assert f"not evaluated {lost}: no best epoch, every epoch predicted one class (collapsed)" in done.output


def test_results_of_other_weights_are_marked(tmp_path: Path) -> None:
    run = fake_run(tmp_path, NAME, FOUND)
    stale = run / "result-best.json"
    stale.write_text(fake_result(NAME, "best", 1, FOUND).to_json())
    (run / "result-epoch-0001.json").write_text(fake_result(NAME, "epoch-0001", 1, FOUND).to_json())
    done = flatrock("results", run, "--csv", tmp_path / "a.csv")
    assert f"stale {stale}: of other weights than the run has now" in done.output
    assert [(line["which"], line["stale"]) for line in lines(tmp_path / "a.csv")] == [
        ("best", "1"),
        ("epoch-0001", "0"),
    ]


def test_files_of_models_that_are_no_runs_and_of_runs(tmp_path: Path) -> None:
    flags = {"clean": standing(900), "seed": standing(500), "rays": standing(400)}
    found = Result(
        threat={"norm": "l2", "eps": 0.5},
        flags=flags,
        distances={"rays": torch.where(standing(400), 1.0, 0.25).double()},
        findings=(Finding("E02", "a", "b"), Finding("E09", "a", "b")),
        provenance={"model": "mynet:make", "data": "mine", "votes": 3},
    )
    (tmp_path / "own.json").write_text(found.to_json())
    run = fake_run(tmp_path, NAME, FOUND)
    table = sheet([tmp_path / "own.json", run / "result-best.json", run])
    assert len(table.rows) == 2, "one that is named twice has one line"
    own, of_run = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert (own["run"], own["model"], own["votes"], own["findings"]) == ("", "mynet:make", 3, "E02 E09")
    assert (own["attack seed"], own["seed"], own["stale"]) == (0.5, "", ""), "an attack may be called as a column is"
    assert (own["rays"], own["mean_distance rays"], own["worst_case"]) == (0.4, pytest.approx(0.55), 0.4)
    assert (of_run["run"], of_run["status"]) == (str(run), "finished")


def test_both_at_once_and_one_run_asked_in_many_ways(tmp_path: Path) -> None:
    run = fake_run(tmp_path, NAME, FOUND, last={**FOUND, "pgd-20": 50.0})
    weak = more(run, "result-best-linf-0.01-pgd-20.json", {"clean": 80.0, "pgd-20": 70.0})
    (run / "result-best-linf-0.01-pgd-20.json").write_text(
        replace(weak, threat={"norm": "linf", "eps": 0.01}).to_json()
    )
    done = flatrock("results", run, "--csv", tmp_path / "a.csv", "--out", tmp_path / "rows.json")
    assert done.exit_code == 0, done.output
    assert list((read_rows(tmp_path / "rows.json") or [])[0].scores) == ["best", "last"], "not what was asked otherwise"
    assert sorted((line["which"], line["eps"], line["pgd-20"]) for line in lines(tmp_path / "a.csv")) == [
        ("best", "0.01", "0.7"), ("best", str(8 / 255), "0.53"), ("last", str(8 / 255), "0.5")
    ]  # fmt: skip


def test_what_cannot_be_done_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    run, out, table = fake_run(tmp_path / "runs", NAME, FOUND), tmp_path / "rows.json", tmp_path / "a.csv"
    rows, damaged, empty = (tmp_path / name for name in ("many.json", "damaged.json", "empty"))
    assert flatrock("results", run, "--out", rows).exit_code == 0
    damaged.write_text((run / "result-best.json").read_text().replace('"clean": 0.8', '"clean": 0.9'))
    empty.mkdir()
    for words, said in (
        ([run], "nowhere to write to; give --out FILE.json (for `flatrock report`), --csv FILE.csv, or both"),
        ([run, "--csv", table, "--add"], "--add is about the rows of --out, which is not given"),
        ([run, "--csv", tmp_path / "a.tsv"], "a.tsv must end in .csv"),
        ([run / "result-best.json", "--csv", table, "--out", out], "is a file, and rows of --out are of runs"),
        ([rows, "--csv", table], "many.json holds rows of many runs; name run folders, or result-*.json files"),
        ([damaged, "--csv", table], "its accuracies do not follow from its flags"),
        ([empty, "--csv", table], "is not a run folder: it has no run.json"),
        ([tmp_path / "nowhere", "--csv", table], "nowhere cannot be read"),
        ([run, damaged, "--csv", table], "its accuracies do not follow"),
    ):
        done = flatrock("results", *words)
        assert done.exit_code == 2, words
        assert said in " ".join(done.output.split()), done.output
        assert not table.exists() and not out.exists()


def test_two_runs_alike_are_named(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / part, NAME, FOUND) for part in "ab"]
    done = flatrock("results", *runs, "--out", tmp_path / "rows.json")
    assert f"two runs have the same recipe and seed: {runs[0]} and {runs[1]}, {NAME}, 0; name one" in done.output
    assert flatrock("results", *runs, "--csv", tmp_path / "a.csv").exit_code == 0, "a table may have both"


def test_one_question_asked_twice_is_one_line(tmp_path: Path) -> None:
    runs = [fake_run(tmp_path / f"{seed}", NAME, FOUND, overrides={"seed": seed}) for seed in range(2)]
    for run in runs:
        usual = run / "result-best.json"
        asked = replace(
            Result.from_json(usual.read_text()), provenance={"question": run.parent.name, "checkpoint": "best"}
        )
        for file in (usual, run / "result-best-pgd-20+autoattack-n1000-seed0.json"):
            file.write_text(asked.to_json())
    done = flatrock("results", *runs, "--csv", tmp_path / "a.csv")
    assert done.exit_code == 0, done.output
    assert done.output.count("another result of its run answers the very same question") == 2
    assert "2 lines with a result" in done.output
    assert [line["file"] for line in lines(tmp_path / "a.csv")] == [str(run / "result-best.json") for run in runs]


def test_options_of_methods_have_columns_also_of_recipes_of_several_names(tmp_path: Path) -> None:
    gammas = (0.005, 0.01)
    runs = [
        fake_run(tmp_path / f"{gamma}", "cifar10_short_trades_awp", FOUND, overrides={"flatness.awp.gamma": gamma})
        for gamma in gammas
    ]
    runs.append(fake_run(tmp_path, NAME, FOUND))
    found = sheet(runs)
    column = found.header.index("flatness.awp.gamma")
    assert [row[column] for row in found.rows] == [*gammas, ""]
    assert [row[found.header.index("flatness")] for row in found.rows] == ['["awp"]', '["awp"]', "[]"]
    assert sheet(runs[:2]).header.count("flatness") == 0, "both have the same methods"


def test_a_cell_is_empty_only_where_there_is_no_such_thing(tmp_path: Path) -> None:
    """Values in effect, so that pandas groups a run that left them to their defaults like any other."""
    wanted: list[dict[str, Any]] = [
        {},
        {"flatness": ["awp"], "objective.label_smoothing": 0.1, "train.clip_norm": 1.0},
        {"flatness": [{"name": "awp", "gamma": 0.01}], "objective": {"name": "trades", "beta": 3}},
        {"objective": {"name": "trades"}, "attack.step_size": 0.001},
        {"objective.name": "at"},
    ]
    runs = [fake_run(tmp_path / f"{i}", NAME, FOUND, overrides=changes) for i, changes in enumerate(wanted)]
    assert flatrock("results", *runs, "--csv", tmp_path / "a.csv").exit_code == 0
    found = lines(tmp_path / "a.csv")
    column = {key: [line[key] for line in found] for key in found[0]}
    assert column["flatness"] == ["[]", '["awp"]', '["awp"]', "[]", "[]"]
    assert column["flatness.awp.gamma"] == ["", "0.005", "0.01", "", ""]
    assert column["objective.beta"] == ["6", "6", "3", "6", ""]
    assert column["objective.label_smoothing"] == ["0", "0.1", "0", "0", "0"]
    assert column["train.clip_norm"] == ["none", "1", "none", "none", "none"]
    assert [float(cell) for cell in column["attack.step_size"]] == [2 / 255, 2 / 255, 2 / 255, 0.001, 2 / 255]
    assert "flatness.awp.warmup" not in column, "what nobody gave follows from the method"
    assert column["changes"][1].startswith("flatness: ['awp'] instead of []; objective.label_smoothing: 0.1 instead of")
    assert column["changes"][0] == "" and "None" not in column["changes"][1].replace(
        "clip_norm: 1.0 instead of None", ""
    )


def test_defaults_that_are_said_are_no_change(tmp_path: Path) -> None:
    said = fake_run(tmp_path, NAME, FOUND, overrides={"objective.forwards": "paper", "attack.restarts": 1})
    found = sheet([said, fake_run(tmp_path / "b", NAME, FOUND)])
    assert [row[found.header.index("changes")] for row in found.rows] == ["", ""]
    assert "objective.forwards" not in found.header


def test_the_result_a_run_is_known_by_is_marked(tmp_path: Path) -> None:
    """One of each run: of averaged weights, of plain ones where all averages collapsed, of none that is stale."""
    plain = fake_run(tmp_path / "a", NAME, FOUND, last=FOUND)
    more(plain, "result-best-pgd-2-n1000-seed3.json", {"clean": 80.0, "pgd-2": 60.0})
    averaged = fake_run(tmp_path / "b", "cifar10_short_trades_swa", FOUND, averages=True)
    owner = RunFolder(averaged).owner()
    other = fake_result("cifar10_short_trades_swa", "best", 2, FOUND, recipe_hash=owner)
    (averaged / "result-best.json").write_text(other.to_json())
    collapsed = fake_run(tmp_path / "c", "cifar10_short_at_swa", FOUND, average_collapsed=True)
    stale = fake_run(tmp_path / "d", NAME, FOUND, overrides={"seed": 4})
    (stale / "result-best.json").write_text(fake_result(NAME, "best", 1, FOUND, recipe_hash="?").to_json())
    bare = fake_run(tmp_path / "e", NAME, {}, overrides={"seed": 5})
    runs = [plain, averaged, collapsed, stale, bare]
    found = sheet(runs)
    table = [dict(zip(found.header, row, strict=True)) for row in found.rows]
    known = {line["run"]: Path(line["file"]).name for line in table if line["main"] == 1}
    assert known == {
        str(plain): "result-best.json",
        str(averaged): "result-average-best.json",
        str(collapsed): "result-best.json",
    }
    assert sum(line["main"] == 1 for line in table) == len(known)
    assert known == {str(run): one.name for run in runs if (one := standing_of(run).main) is not None}
    for run in (plain, averaged, collapsed):
        row = collect_run(run)
        assert known[str(run)] == f"result-{row.main}.json", "as in tables of sweeps and pages of results"


def test_a_copied_run_is_counted_once(tmp_path: Path) -> None:
    run = fake_run(tmp_path, NAME, FOUND)
    best = Result.from_json((run / "result-best.json").read_text())
    (run / "result-best.json").write_text(replace(best, provenance={**best.provenance, "question": "one"}).to_json())
    copy, other = tmp_path / "at0 copy", fake_run(tmp_path / "b", NAME, FOUND, overrides={"seed": 1})
    shutil.copytree(run, copy)
    result = Result.from_json((other / "result-best.json").read_text())
    (other / "result-best.json").write_text(
        replace(result, provenance={**result.provenance, "question": "one"}).to_json()
    )
    done = flatrock("results", run, copy, other, "--csv", tmp_path / "a.csv")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert f"left out {copy / 'result-best.json'}: {run / 'result-best.json'}, of the same recipe and seed," in said
    assert "2 lines with a result" in said
    assert [(line["run"], line["main"]) for line in lines(tmp_path / "a.csv")] == [(str(run), "1"), (str(other), "1")]
    folder = RunFolder(run)  # trained on: its own result is old now, that of the copy is not
    folder.rewrite([replace(record, best_epoch=min(record.epoch, 3)) for record in folder.records()])
    found = sheet([run, copy])
    assert [row[found.header.index("stale")] for row in found.rows] == [1, 0] and found.again == ()


def test_what_lies_beside_runs_is_left_out_and_told(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "runs", NAME, FOUND)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "page.png").write_bytes(b"")
    assert flatrock("results", run, "--out", tmp_path / "runs" / "reproduce.json").exit_code == 0
    every = sorted((tmp_path / "runs").iterdir())
    for option, file in (("--csv", tmp_path / "a.csv"), ("--out", tmp_path / "rows.json")):
        done = flatrock("results", *every, option, file)
        assert done.exit_code == 0, done.output
        assert done.output.count("left out ") == 3 and "no run folder, it has no run.json" in done.output
        assert file.is_file()


def test_a_recipe_that_was_edited_is_not_believed(tmp_path: Path) -> None:
    run = fake_run(tmp_path, NAME, FOUND)
    file = run / "recipe.yaml"
    file.write_text(file.read_text().replace("beta: 6", "beta: 3"))
    for words in (["--csv", tmp_path / "a.csv"], ["--out", tmp_path / "a.json"]):
        done = flatrock("results", run, *words)
        assert done.exit_code == 2
        assert "recipe.yaml was edited: its run was trained with another recipe" in " ".join(done.output.split())
    file.write_text(file.read_text().replace("beta: 3", "beta: 6"))
    assert flatrock("results", run, "--csv", tmp_path / "a.csv").exit_code == 0


def test_a_kept_epoch_that_is_the_best_one_keeps_its_line(tmp_path: Path) -> None:
    run = fake_run(tmp_path, NAME, FOUND)
    best = Result.from_json((run / "result-best.json").read_text())
    for which, name in (("best", "result-best.json"), ("epoch-0002", "result-epoch-0002.json")):
        about = {**best.provenance, "question": "one", "checkpoint": f"{which}.safetensors"}
        (run / name).write_text(replace(best, provenance=about).to_json())
    found = sheet([run])
    assert [row[found.header.index("which")] for row in found.rows] == ["best", "epoch-0002"]
    assert found.again == ()


def test_defaults_are_those_a_run_was_trained_with(tmp_path: Path) -> None:
    """As it recorded them: today's may be others."""
    runs = [
        fake_run(tmp_path / name, NAME, FOUND, overrides=asked)
        for name, asked in (("plain", {}), ("said", {"objective.beta": 3}))
    ]
    folder = RunFolder(runs[0])
    about = folder.read_info()["provenance"]
    folder.write_info(provenance={**about, "settings": {"objective": {"name": "trades", "beta": 7.5}}})
    found = sheet(runs)
    assert [row[found.header.index("objective.beta")] for row in found.rows] == [7.5, 3]
