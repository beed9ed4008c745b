"""`flatrock compare`: differences are those of the same samples, and what was not asked alike is not compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from results_cases import N, fake_result, fake_run, standing
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.core.errors import StateError
from flatrock.core.rows import WORST
from flatrock.reports.compare import accuracy_table, difference_table
from flatrock.workflows.compare import Judged, check_alike, other_options, under_one_name
from flatrock.workflows.in_common import compared

AT = {"clean": 81.0, "pgd-20": 50.0, "autoattack": 47.0}
TRADES = {"clean": 80.0, "pgd-20": 52.1, "autoattack": 47.0}


def flatrock(*words: object) -> Any:
    return CliRunner().invoke(app, ["compare", *map(str, words)], env={"COLUMNS": "200"})


def judged(source: str) -> list[Judged]:
    return compared([source])[0]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [fake_run(tmp_path, "cifar10_short_at", AT), fake_run(tmp_path, "cifar10_short_trades", TRADES)]


def test_tables_by_hand() -> None:
    """4 samples, differences 1, 1, 0, -1 and 0, 0, 0, 0: means 1/4 and 0, deviations sqrt(11/16) and 0."""
    one = {"pgd": torch.tensor([0, 0, 1, 1]), "clean": torch.tensor([1, 1, 1, 1]), WORST: torch.tensor([0, 0, 1, 1])}
    two = {"clean": torch.tensor([1, 1, 1, 1]), "pgd": torch.tensor([1, 1, 1, 0]), "cw": torch.tensor([0, 0, 0, 1])}
    models = {"one": one, "two": two}
    assert accuracy_table(models).header == ("model", "clean", "pgd", "cw", WORST)
    assert accuracy_table(models).rows == (
        ("one", "100.00", "50.00", "", "50.00"),
        ("two", "100.00", "75.00", "25.00", ""),
    )
    table = difference_table(models)
    error = 100 * (11 / 16 / 4) ** 0.5
    assert table.header == ("minus one", "clean", "pgd", WORST)
    assert table.rows == (("two", "+0.00 ± 0.00", f"+25.00 ± {error:.2f}", ""),)
    assert difference_table(models, leave_out=["pgd", WORST]).header == ("minus one", "clean")


def test_more_than_two_standard_errors_are_marked() -> None:
    base = {"clean": standing(500)}
    cells = [difference_table({"a": base, "b": {"clean": standing(500 + more)}}).rows[0][1] for more in (3, 5)]
    # more / N of mean, sqrt(more) / N of error, nearly: 3 < 2 sqrt(3), 5 > 2 sqrt(5)
    assert [cell.endswith(" !") for cell in cells] == [False, True]


def test_runs_files_and_rows_say_the_same(runs: list[Path], tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    assert CliRunner().invoke(app, ["results", *map(str, runs), "--out", str(rows)]).exit_code == 0
    by_run = [judged(str(run))[0] for run in runs]
    by_file = [judged(str(run / "result-best.json"))[0] for run in runs]
    by_row = judged(str(rows))
    assert [m.name for m in by_row] == ["cifar10_short_at (seed 0)", "cifar10_short_trades (seed 0)"]
    assert [m.name for m in by_run] == [str(run) for run in runs]
    for found in zip(by_run, by_file, by_row, strict=True):
        check_alike(found)
        for name in ("clean", "pgd-20", "autoattack", WORST):
            assert all(torch.equal(model.right[name], found[0].right[name]) for model in found)
    assert float(by_run[0].right[WORST].double().mean()) == 0.47
    assert [m.name for m in judged(f"{rows}:cifar10_short_trades")] == ["cifar10_short_trades (seed 0)"]
    with pytest.raises(StateError, match=r"unknown row 'cifar10_short_a'.*did you mean 'cifar10_short_at'"):
        judged(f"{rows}:cifar10_short_a")


def test_averaged_weights_are_compared_where_they_are_kept(tmp_path: Path) -> None:
    run = fake_run(tmp_path, "cifar10_short_at_swa", AT, averages=True)
    assert float(judged(str(run))[0].right["clean"].double().mean()) == 0.81
    (run / "result-average-best.json").rename(run / "result-best.json")
    run = run.rename(tmp_path / "a b")
    with pytest.raises(
        StateError,
        match=r"(?s)no result-average-best.json, .*; run `flatrock eval '.*a b'` first.*a b: result-best.json",
    ):
        judged(str(run))


def test_plain_weights_are_compared_where_every_average_collapsed(tmp_path: Path) -> None:
    """As `flatrock results` takes them, and the cure is one that `flatrock eval` does not refuse."""
    swa = fake_run(tmp_path, "cifar10_short_at_swa", TRADES, average_collapsed=True)
    plain = fake_run(tmp_path, "cifar10_short_at", AT)
    assert "+2.10 ± 0.45 !" in flatrock(plain, swa).output
    (swa / "result-best.json").unlink()
    done = flatrock(plain, swa)
    assert done.exit_code == 2 and f"run `flatrock eval {swa} --which best` first" in " ".join(done.output.split())


def test_the_command(runs: list[Path], tmp_path: Path) -> None:
    done = flatrock(*runs)
    assert done.exit_code == 0, done.output
    assert "+2.10 ± 0.45 !" in done.output
    assert "-1.00 ± 0.31 !" in done.output
    assert "+0.00 ± 0.00 " in done.output
    assert f"cifar10 test, {N} of {N} samples; linf eps 0.03137" in done.output
    assert "not compared" not in done.output
    assert "chosen by looking" not in done.output


def changed(run: Path, **values: Any) -> None:
    file = run / "result-best.json"
    content = json.loads(file.read_text())
    for name, value in values.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    file.write_text(json.dumps(content))


def test_what_differs_is_refused_or_left_out(runs: list[Path]) -> None:
    changed(runs[0], attacks={"pgd-20": {"step_size": 0.003}})
    changed(runs[1], attacks={"pgd-20": {"step_size": 0.007}}, marks=["test-selected"])
    done = flatrock(*runs)
    assert "not compared pgd-20: its options differ" in done.output
    assert "not compared worst case" in done.output
    assert "± 0.45" not in done.output
    assert f"{runs[1]}*" in done.output
    assert "* = the checkpoint was chosen by looking at the test set" in done.output
    assert other_options([judged(str(run))[0] for run in runs]) == ["pgd-20"]
    for run, steps in zip(runs, (100, 50), strict=True):
        changed(run, attacks={"pgd-20": {}, "autoattack/apgd-ce": {"steps": steps}})
    done = flatrock(*runs)
    assert "not compared autoattack: its options differ" in done.output
    assert done.output.count("autoattack") == 2, "its accuracies, and why they are not compared"
    assert "± 0.45" in done.output
    changed(runs[1], threat={"eps": 4 / 255})
    assert "cannot be compared: linf eps 0.0313725 and linf eps 0.0156863" in " ".join(flatrock(*runs).output.split())
    changed(runs[1], threat={"eps": 8 / 255 + 1e-6})
    assert "cannot be compared: linf eps" in " ".join(flatrock(*runs).output.split())
    changed(runs[1], threat={"eps": 8 / 255}, provenance={"data": "svhn test, 1000 of 1000 samples"})
    assert "cifar10 test, 1000 of 1000 samples, and svhn test, 1000 of 1000 samples" in " ".join(
        flatrock(*runs).output.split()
    )


PGD = {"kind": "GradientAttack", "steps": 5, "step_size": 2 / 255}


def called(run: Path, name: str, **options: Any) -> None:
    """The run's pgd-20 under another name, with these options."""
    file = run / "result-best.json"
    content = json.loads(file.read_text())
    for part in ("flags", "per_attack", "costs"):
        content[part][name] = content[part].pop("pgd-20")
    content["attacks"] = {name: {**PGD, **options}}
    file.write_text(json.dumps(content))


def test_one_attack_written_in_two_ways_is_one(runs: list[Path]) -> None:
    plain = flatrock(*runs)
    for run, name in zip(runs, ("pgd-5:step_size=2/255", "pgd-5:step_size=0.00784313725490196"), strict=True):
        called(run, name)
    done = flatrock(*runs)
    assert done.exit_code == 0 and "not compared" not in done.output
    assert done.output.count("+2.10 ± 0.45 !") == plain.output.count("+2.10 ± 0.45 !") == 1
    assert f"\npgd-5:step_size=0.00784313725490196 of {runs[1]} is pgd-5:step_size=2/255 here: " in done.output
    assert done.output.count("0.00784") == 1, "nowhere else"
    models, told = under_one_name([judged(str(run))[0] for run in reversed(runs)])
    assert [set(m.right) for m in models] == [{"clean", "autoattack", "pgd-5:step_size=0.00784313725490196", WORST}] * 2
    assert len(told) == 1


def test_other_options_and_names_that_are_taken_stay_apart(runs: list[Path]) -> None:
    called(runs[0], "mine")
    called(runs[1], "pgd-5", restarts=2)
    assert "not compared worst case" in flatrock(*runs).output
    model, other = (judged(str(run))[0] for run in runs)
    flags = model.right["mine"]
    twice = replace(other, right={"mine": flags, "pgd": flags}, options={"mine": {**PGD, "steps": 9}, "pgd": PGD})
    models, told = under_one_name([model, twice])
    assert set(models[1].right) == {"mine", "pgd"} and told == [], "mine is another attack there, and is told as such"
    assert other_options(models) == ["mine"]
    draws = replace(other, right={"a": flags, "b": flags}, options={"a": PGD, "b": PGD})
    models, told = under_one_name([model, draws])
    assert set(models[1].right) == {"mine", "b"}, "one of two draws is it, the other is one more"


def test_inputs_crafted_on_another_network_are_another_attack(runs: list[Path]) -> None:
    for run, weights in zip(runs, ("aa", "bb"), strict=True):
        changed(
            run, attacks={"pgd-20": {"kind": "Transfer", "by": PGD}}, provenance={"surrogate": {"weights": weights}}
        )
    assert "not compared pgd-20: its options differ" in flatrock(*runs).output
    changed(runs[1], provenance={"surrogate": {"weights": "aa"}})
    assert "not compared" not in flatrock(*runs).output


def test_another_number_of_votes_is_refused(runs: list[Path]) -> None:
    changed(runs[1], provenance={"votes": 15})
    done = flatrock(*runs)
    assert done.exit_code == 2
    said = "cannot be compared: the majority of 1 answers decided about one, of 15 about the other; evaluate both alike"
    assert said in " ".join(done.output.split())
    changed(runs[0], provenance={"votes": 15})
    assert flatrock(*runs).exit_code == 0


def test_other_samples_of_one_test_set_are_refused(runs: list[Path]) -> None:
    for run, first in zip(runs, (0, 1), strict=True):
        changed(run, ids=list(range(first, N + first)))
    done = flatrock(*runs)
    assert done.exit_code == 2
    assert "other samples of one test set" in done.output
    changed(runs[0], ids=None)
    assert "other samples of one test set" in flatrock(*runs).output
    changed(runs[1], ids=list(range(N)))
    assert flatrock(*runs).exit_code == 0, "no places: all, in order"


def test_samples_are_known_by_their_contents_or_their_name(runs: list[Path]) -> None:
    for run, digest in zip(runs, ("aa", "bb"), strict=True):
        changed(run, provenance={"samples_digest": digest})
    assert "their contents differ" in flatrock(*runs).output
    changed(runs[1], provenance={"samples_digest": "aa"})
    assert flatrock(*runs).exit_code == 0
    for run in runs:
        nameless(run)
    assert flatrock(*runs).exit_code == 0, "the contents are the same"
    changed(runs[1], provenance={"samples_digest": None})
    assert "whether their samples are the same is not known" in " ".join(flatrock(*runs).output.split())


def nameless(run: Path) -> None:
    file = run / "result-best.json"
    content = json.loads(file.read_text())
    del content["provenance"]["data"]
    file.write_text(json.dumps(content))


def test_rows_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    run = fake_run(tmp_path, "cifar10_short_at", AT, overrides={"train.epochs": 3})
    rows = tmp_path / "rows.json"
    assert CliRunner().invoke(app, ["results", str(run), "--out", str(rows)]).exit_code == 0
    for source in (str(rows), f"{rows}:cifar10_short_at"):
        with pytest.raises(StateError, match=r"no row to compare: those of cifar10_short_at were changed.*run folder"):
            judged(source)
    (tmp_path / "best.safetensors").write_bytes(b"weights")
    with pytest.raises(StateError, match="holds weights; name its run folder"):
        judged(str(tmp_path / "best.safetensors"))


def test_one_model_or_the_same_twice_is_refused(runs: list[Path]) -> None:
    assert "there is 1 model to compare" in flatrock(runs[0]).output
    assert "is named twice" in flatrock(runs[0], runs[1], runs[0]).output
    assert "there is no file" in flatrock(runs[0], "nowhere.json").output


@pytest.mark.parametrize("about", [{"epoch": 1}, {"recipe_hash": "0" * 16}])
def test_results_of_other_weights_than_a_run_has_are_refused(runs: list[Path], about: dict[str, Any]) -> None:
    """A run evaluated, then trained on; `--which` names other weights, whose result is of those there are."""
    file = runs[1] / "result-best.json"
    fresh = file.read_text()
    file.write_text(fake_result(runs[1].name, "best", **{"epoch": 2, "percents": TRADES, **about}).to_json())
    done = flatrock(*runs)
    assert done.exit_code == 2
    command = f"evaluate again with `flatrock eval {runs[1]}`"
    assert f"{file} is of other weights than the run has now; {command}" in " ".join(done.output.split())
    (runs[1] / "result-last.json").write_text(fake_result(runs[1].name, "last", 2, TRADES).to_json())
    (runs[0] / "result-last.json").write_text(fake_result(runs[0].name, "last", 3, AT).to_json())
    assert f"`flatrock eval {runs[1]} --which last`" in flatrock(*runs, "--which", "last").output
    file.write_text(fresh)
    assert flatrock(*runs).exit_code == 0


def test_runs_that_had_not_ended_are_told(runs: list[Path]) -> None:
    assert "not finished" not in flatrock(*runs).output
    file = runs[1] / "result-best.json"
    file.write_text(fake_result(runs[1].name, "best", 2, TRADES, unfinished="3 of 30 epochs").to_json())
    for named in (runs[1], file):
        done = flatrock(runs[0], named)
        assert done.exit_code == 0, done.output
        assert f"not finished {named}: evaluated when its run was at 3 of 30 epochs" in done.output
        assert f"not finished {runs[0]}" not in done.output
