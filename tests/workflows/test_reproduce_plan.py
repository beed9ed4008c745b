"""What a table is made of, before anything is made: names, folders, order, and every fault at once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from results_cases import fake_run

from flatrock.core.errors import ConfigError
from flatrock.engine.folder import RunFolder
from flatrock.recipes.load import load_recipe, recipe_names
from flatrock.recipes.pieces import recipe_hash
from flatrock.workflows.reproduce_plan import Planned, plan_rows
from flatrock.workflows.train import train_recipe

FOUND = {"clean": 80.0, "fgsm": 55.0, "pgd-20": 50.0, "cw-20": 49.0}
SMALL = {"data.limit": 512, "train.batch_size": 64, "train.epochs": 2, "train.tensorboard": False, "select.size": 40}


def names(rows: list[Planned]) -> list[str]:
    return [row.recipe.name for row in rows]


def fault(*words: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_rows(words, **options)
    return list(caught.value.faults)


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plans write nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLATROCK_DATA", raising=False)
    return tmp_path


# Names


def test_names_patterns_files_and_tables() -> None:
    (Path("mine.yaml")).write_text("base: digits_at\n")
    assert names(plan_rows(["digits_at", "mine.yaml", "digits_at"])) == ["digits_at", "mine"]
    wanted = [name for name in recipe_names() if name.startswith("digits_trades")]
    assert len(wanted) > 5
    assert names(plan_rows(["digits_trades*"])) == wanted
    assert names(plan_rows(["digits_trades", "digits_trades*"])) == sorted(wanted, key=lambda n: n != "digits_trades")
    tables = {"both": ["moons_at", "digits_at"], "digits_a*": ["moons_at"]}
    assert names(plan_rows(["both", "moons_at"], tables=tables)) == ["moons_at", "digits_at"]
    assert names(plan_rows(["digits_a*"], tables=tables)) == ["moons_at"], "a table before a pattern"
    assert names(plan_rows(["digits_[am]*t"])) == ["digits_at", "digits_atent", "digits_mart"]


def test_names_that_are_none_are_told_with_those_alike() -> None:
    faults = fault("digits_att", "rat_tabel1", "nothing_like_*", tables={"rat_table1": ["digits_at"]})
    assert len(faults) == 3
    assert "unknown recipe, pattern or table 'digits_att'" in faults[0]
    assert "did you mean 'digits_at'?" in faults[0]
    assert "did you mean 'rat_table1'?" in faults[1]
    assert "'nothing_like_*'" in faults[2]
    assert fault() == ["no recipe is named; see `flatrock ls recipes`"]


def test_faults_of_all_recipes_are_told_at_once_and_those_alike_once() -> None:
    Path("bad.yaml").write_text("base: digits_at\nthreat: {eps: 8}\nmodel: {name: resnet}\n")
    faults = fault("bad.yaml", "digits_*", "digits_att", overrides=["train.epohcs=3"])
    alike = [f for f in faults if "did you mean 'epochs'" in f]
    assert len(alike) == 1
    assert alike[0].startswith("bad.yaml, digits_alp, digits_at and ")
    assert sum("8/255, not 8" in f or "unknown model 'resnet'" in f for f in faults) == 2
    assert any("'digits_att'" in f for f in faults)
    assert len(faults) == 4
    faults = fault("digits_at", "digits_trades_rat", overrides=["flatness.awp.gamma=1"])
    assert len(faults) == 2


def test_a_recipe_that_is_whole_only_with_overrides() -> None:
    Path("half.yaml").write_text("base: digits_at\nthreat: {eps: 8}\n")
    (row,) = plan_rows(["half.yaml"], ["threat.eps=0.1"])
    assert row.folder.name.startswith("half-")
    assert row.folder != plan_rows(["half.yaml"], ["threat.eps=0.2"])[0].folder


# Folders


def test_changed_recipes_have_folders_of_their_own() -> None:
    def place(*overrides: str, **options: Any) -> str:
        (row,) = plan_rows(["digits_at"], list(overrides), **options)
        return str(row.folder)

    assert place() == "runs/digits_at"
    assert place(runs_dir=Path("else")) == "else/digits_at"
    assert place("train.epochs=3") == "runs/digits_at-train.epochs=3"
    assert place("train.epochs=20", "threat.eps=1/5") == "runs/digits_at", "as the recipe says"
    both = place("train.epochs=3", "data.limit=600")
    assert both == place("data.limit=600", "train.epochs=3") == "runs/digits_at-data.limit=600-train.epochs=3"
    assert place("seed=2") == "runs/digits_at-seed2"
    assert place("evaluate.attacks=[pgd-20]") != place("evaluate.attacks=[pgd-50]") != place()
    long = [f"{key}=1" for key in ("data.augment.shift", "data.augment.crop", "select.size", "train.epochs")]
    assert len(Path(place(*long, "optimizer.l1=1")).name) < 100
    assert place(*long, "optimizer.l1=1") != place(*long, "optimizer.l2=1")
    rows = plan_rows(["digits_at"], ["train.epochs=3"], seeds=(0, 4))
    assert [(str(r.folder), r.recipe.seed) for r in rows] == [
        ("runs/digits_at-train.epochs=3-seed0", 0),
        ("runs/digits_at-train.epochs=3-seed4", 4),
    ]
    assert "seed=3 and --seeds exclude each other" in fault("digits_at", overrides=["seed=3"], seeds=(0, 1))[0]


def test_two_recipes_do_not_share_a_folder() -> None:
    Path("mine.yaml").write_text("base: digits_at\nname: digits_at\n")
    faults = fault("digits_at", "mine.yaml")
    assert faults == ["digits_at: two recipes would be trained into runs/digits_at; give one of them another name"]


@pytest.mark.parametrize("status", ["finished", "running", "failed"])
def test_a_run_of_another_recipe_is_refused(status: str) -> None:
    fake_run(Path("runs"), "digits_at", FOUND, overrides={"train.epochs": 3}, status=status)
    (told,) = fault("digits_at")
    assert told == (
        "digits_at: runs/digits_at is a run of another recipe: train.epochs: 3 there, 20 asked for; remove it, or "
        "choose another place with --runs-dir"
    )
    assert names(plan_rows(["digits_at"], ["train.epochs=3"])) == ["digits_at"]


def test_a_run_that_was_attacked_otherwise_is_evaluated_again() -> None:
    fake_run(Path("runs"), "digits_mart", {"clean": 80, "pgd-20": 50}, overrides={"evaluate.attacks": ["pgd-20"]})
    (row,) = plan_rows(["digits_mart"])
    assert row.left() == ["best"]
    assert plan_rows(["digits_mart"], {"evaluate.attacks": ["pgd-20"]})[0].folder != row.folder


def test_a_folder_of_something_else_is_refused() -> None:
    Path("runs/digits_at").mkdir(parents=True)
    assert plan_rows(["digits_at"])[0].status == "new"
    Path("runs/digits_at/.run.json.part").write_text("{")
    assert plan_rows(["digits_at"])[0].status == "new", "killed at its first file"
    Path("runs/digits_at/thesis.tex").write_text("")
    (told,) = fault("digits_at")
    assert told == (
        "digits_at: runs/digits_at holds something that is not a flatrock run; choose another place with --runs-dir"
    )


# Data and helpers


def test_data_that_are_missing_are_told_before() -> None:
    faults = fault("cifar10_short_at", "cifar10_short_trades", "digits_at", "cifar10_rst_awp_linf_wrn28")
    assert len(faults) == 2
    assert faults[0].startswith("cifar10_short_at, cifar10_short_trades, cifar10_rst_awp_linf_wrn28: cifar10 not found")
    assert "or train with --download" in faults[0]
    assert "cifar10_rst_awp_linf_wrn28: data.extra.file: there is no file" in faults[1]
    assert len(plan_rows(["cifar10_short_at"], download=True)) == 1


def test_what_is_done_needs_no_data() -> None:
    fake_run(Path("runs"), "cifar10_short_at", {"clean": 80.0, "pgd-20": 50.0, "cw-20": 50.0, "autoattack": 48.0})
    (row,) = plan_rows(["cifar10_short_at"])
    assert (row.status, row.left()) == ("finished", [])


def test_a_helper_comes_first_wherever_the_runs_are() -> None:
    rows = plan_rows(["digits_hat", "digits_at", "digits_standard"], ["train.epochs=1"], runs_dir=Path("else"))
    assert names(rows) == ["digits_standard", "digits_hat", "digits_at"]
    place = rows[0].folder
    assert rows[1].recipe.objective.options["helper"] == str(place) == "else/digits_standard-train.epochs=1"
    assert rows[1].folder == Path("else/digits_hat-train.epochs=1"), "where its helper lies does not change a recipe"
    rows = plan_rows(["digits_hat", "digits_standard"], seeds=(1, 0))
    assert {row.recipe.objective.options.get("helper") for row in rows} == {None, "runs/digits_standard-seed0"}
    assert rows[0].folder == Path("runs/digits_standard-seed0")
    assert len(rows) == 4


def test_what_a_row_begins_with_comes_first_too() -> None:
    """Also where two rows need the same run, and one of them two runs."""
    both = ["model.weights=runs/digits_trades"]
    rows = plan_rows(["digits_finetune", "digits_hat", "digits_standard"], runs_dir=Path("else"))
    assert names(rows) == ["digits_standard", "digits_finetune", "digits_hat"]
    assert rows[1].recipe.model.weights == rows[2].recipe.objective.options["helper"] == "else/digits_standard"
    assert recipe_hash(rows[1].recipe) == recipe_hash(load_recipe("digits_finetune"))
    (told,) = fault("digits_finetune", "digits_at")
    assert "model.weights: there is no run runs/digits_standard; name digits_standard too, it will come first" in told
    faults = fault("digits_hat", overrides=both)
    assert [text.split(": ")[1] for text in faults] == ["objective.helper", "model.weights"]


def test_keys_that_decide_no_number_are_in_no_name() -> None:
    (row,) = plan_rows(["digits_at"], ["train.save_seconds=1", "train.tensorboard=false"])
    assert row.folder == Path("runs/digits_at")
    (row,) = plan_rows(["digits_at"], ["evaluate.attacks=[fgsm]"])
    assert row.folder.name.startswith("digits_at-evaluate.attacks=_fgsm_-")
    train_recipe("digits_standard", folder="a", device="cpu", **SMALL)
    shutil.copytree("a", "b")
    found = [plan_rows(["digits_at"], [f"model.weights={place}"])[0].folder for place in ("a", "b")]
    assert found == [Path("runs/digits_at-model.weights=a"), Path("runs/digits_at-model.weights=b")]


def test_a_recipe_does_not_wait_for_itself() -> None:
    Path("my.yaml").write_text("base: digits_at\nmodel: {weights: runs/my}\n")
    (told,) = fault("my.yaml")
    assert "model.weights: there is no run folder, checkpoint or weights file runs/my" in told


def test_a_row_that_has_begun_needs_its_beginning_no_more() -> None:
    train_recipe("digits_standard", folder="runs/digits_standard", device="cpu", **SMALL)
    train_recipe("digits_finetune", folder="runs/digits_finetune", device="cpu")
    RunFolder(Path("runs/digits_finetune")).write_info(status="running")
    shutil.rmtree("runs/digits_standard")
    (row,) = plan_rows(["digits_finetune"])
    assert row.left() == ["train", "best"]


def test_a_helper_that_is_nowhere_is_told_before() -> None:
    (told,) = fault("digits_hat", "digits_at")
    assert told == (
        "digits_hat: objective.helper: there is no run runs/digits_standard; name digits_standard too, it will "
        "come first"
    )
    (told,) = fault("digits_hat", overrides=["objective.helper=runs/mine"])
    assert "there is no run folder or checkpoint runs/mine; train one without attacks" in told


def test_a_helper_that_is_there_is_looked_at() -> None:
    train_recipe("digits_standard", folder="runs/digits_standard", device="cpu", **SMALL)
    (row,) = plan_rows(["digits_hat"])
    assert row.recipe.objective.options["helper"] == "runs/digits_standard"
    (row,) = plan_rows(["digits_hat"], runs_dir=Path("else"))
    assert row.recipe.objective.options["helper"] == "runs/digits_standard", "as the recipe says"
    shutil.copytree("runs/digits_standard", "else/digits_standard")
    (row,) = plan_rows(["digits_hat"], runs_dir=Path("else"))
    assert row.recipe.objective.options["helper"] == "else/digits_standard"
    assert recipe_hash(row.recipe) == recipe_hash(plan_rows(["digits_hat"])[0].recipe)
    RunFolder(Path("else/digits_standard")).write_info(status="failed", reason="lost")
    (told,) = fault("digits_hat", runs_dir=Path("else"))
    assert "FAILED (lost)" in told


# What is left


def test_what_is_left_of_a_row() -> None:
    def left(name: str = "digits_at", last: tuple[str, ...] = ()) -> list[str]:
        (row,) = plan_rows([name], last=last)
        return row.left()

    assert left() == ["train", "best"]
    assert left(last=("digits_at",)) == ["train", "best", "last"]
    path = fake_run(Path("runs"), "digits_at", FOUND)
    assert left() == []
    assert left(last=("digits_at",)) == ["last"]
    for status, expected in (("running", ["train", "best"]), ("failed", []), ("truncated", [])):
        RunFolder(path).write_info(status=status)
        assert left() == expected
    RunFolder(path).write_info(status="finished")
    (path / "result-last.json").write_text("{")
    assert left() == ["last"], "damaged: it is made again"
    fake_run(Path("runs"), "digits_trades_swa", FOUND, averages=True)
    assert left("digits_trades_swa", last=("digits_trades_swa",)) == ["average-last"]
