"""The protocols on CIFAR-10: rows that differ in their method only; and one of `short`, cut down, on a CPU: the hash a
GPU would have, records, resumption, results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from interrupted import Ends
from typer.testing import CliRunner

from flatrock.attacks.guided import Guided
from flatrock.cli.main import app
from flatrock.core.rows import read_rows
from flatrock.core.tensorfile import load
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import ProbeOutcome
from flatrock.recipes import build, probe
from flatrock.recipes.build import build_threat
from flatrock.recipes.load import load_recipe, recipe_names
from flatrock.recipes.pieces import build_attack, recipe_hash
from flatrock.workflows.train import train_recipe

SHORT = [n for n in recipe_names() if n.startswith("cifar10_short_")]
FULL = ["cifar10_full_at", "cifar10_full_at_awp"]
NAME = "cifar10_short_trades_awp"
TINY = {
    "data.held_out": 20,
    "data.limit": 32,
    "model.name": "wide_resnet",
    "model.depth": 10,
    "model.width": 1,
    "train.batch_size": 8,
    "train.epochs": 2,
    "train.save_seconds": 1e-9,
    "train.tensorboard": False,
    "attack.steps": 2,
    "select.every": 1,
    "select.attack": "pgd-2",
    "evaluate.attacks": ["pgd-2", "cw-2"],
}
WORDS = [f"{key}={str(value).replace(chr(39), '')}" for key, value in TINY.items()]
ENGINES: list[dict[str, Any]] = [{"engine.precision": "bfloat16"}, {"engine.compile": True}]


@pytest.fixture(autouse=True)
def data(made_up_data: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise for images, for evaluation too; after so few steps one class for all is no failure."""
    monkeypatch.setattr("flatrock.recipes.part.load_data", build.load_data)

    def outcome(clean: float, robust: float, train_robust: float, *, collapsed: bool) -> ProbeOutcome:
        return ProbeOutcome(clean, robust, train_robust, collapsed=False)

    monkeypatch.setattr(probe, "ProbeOutcome", outcome)


def flatrock(*words: str | Path) -> str:
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("name", [*SHORT, *FULL, "cifar10_flagship"])
def test_rows_of_a_protocol_are_attacked_alike(name: str) -> None:
    recipe = load_recipe(name)
    assert (recipe.data.name, recipe.model.name, recipe.train.batch_size) == ("cifar10", "preact_resnet18", 128)
    assert (recipe.threat.norm, recipe.threat.eps) == ("linf", 8 / 255)
    assert recipe.attack.bn_mode == "eval", "only then a GPU takes the fast path"
    if recipe.objective.name == "gat":  # single-step is what it is
        assert (recipe.attack.name, build_attack(recipe)) == ("guided", Guided())
    elif recipe.objective.name != "standard":
        step = recipe.attack.options.get("step_size", build_threat(recipe).default_step)
        assert (recipe.attack.options["steps"], step) == (10, pytest.approx(2 / 255, rel=1e-15))
    assert (recipe.data.held_out, recipe.select.data) == (1000, "held_out")
    assert recipe.train.epochs % recipe.select.every == 0
    assert recipe.evaluate.attacks == ("pgd-20", "cw-20", "autoattack")
    assert (recipe.optimizer.momentum, recipe.optimizer.weight_decay) == (0.9, 5e-4)


@pytest.mark.parametrize("name", SHORT)
def test_rows_of_the_short_protocol_differ_in_their_method_only(name: str) -> None:
    ours, plain = load_recipe(name).training_keys(), load_recipe("cifar10_short_at").training_keys()
    method = {"objective", "flatness", "attack", "select"}
    assert {k: v for k, v in ours.items() if k not in method} == {k: v for k, v in plain.items() if k not in method}
    assert {**ours["select"], "metric": ""} == {**plain["select"], "metric": ""}
    assert (ours["train"]["epochs"], ours["schedule"]["name"], ours["select"]["every"]) == (30, "one_cycle", 3)


def test_awp_acts_in_the_second_half_of_the_flagship() -> None:
    recipe = load_recipe("cifar10_flagship")
    (awp,) = (f for f in recipe.flatness if f.name == "awp")
    assert awp.options["warmup"] == recipe.train.epochs // 2 + 1


@pytest.mark.parametrize("name", FULL)
def test_the_full_protocol_has_the_published_shape(name: str) -> None:
    recipe, published = load_recipe(name), load_recipe("cifar10_at_linf")
    share = recipe.train.epochs / published.train.epochs
    assert recipe.schedule.options["milestones"] == [share * m for m in published.schedule.options["milestones"]]
    for section in ("data", "model", "threat", "objective", "optimizer"):
        assert getattr(recipe, section) == getattr(published, section)


@pytest.mark.parametrize("name", SHORT)
def test_the_hash_knows_nothing_of_the_machine(name: str) -> None:
    assert "engine" not in load_recipe(name).training_keys()
    for engine in ENGINES:
        assert recipe_hash(load_recipe(name, engine)) == recipe_hash(load_recipe(name))


def test_the_command_trains_under_the_hash_of_its_recipe(run_folder: Path) -> None:
    flatrock("train", NAME, *WORDS, "--run-dir", run_folder, "--device", "cpu")
    info = RunFolder(run_folder).read_info()
    assert info["status"] == "finished"
    assert info["recipe_hash"] == recipe_hash(load_recipe(NAME, TINY))
    assert info["recipe_hash"] == recipe_hash(load_recipe(NAME, {**TINY, **ENGINES[0], **ENGINES[1]}))
    assert yaml.safe_load((run_folder / "recipe.yaml").read_text()) == load_recipe(NAME, TINY).resolved()
    records = RunFolder(run_folder).run().records
    assert [(r.epoch, r.step) for r in records] == [(1, 4), (2, 8)]
    for record in records:
        assert {"total", "ce", "kl"} <= record.terms.keys()
        assert None not in (record.clean, record.robust, record.train_robust)
        assert record.selected_on == "held_out"


@pytest.mark.parametrize("steps", [1, 4, 6])
def test_a_stopped_run_ends_like_one_that_was_not(steps: int, run_folder: Path) -> None:
    whole = train_recipe(NAME, folder=run_folder / "whole", device="cpu", **TINY)
    stopped = run_folder / "stopped"
    with pytest.raises(KeyboardInterrupt):
        train_recipe(NAME, folder=stopped, device="cpu", progress=Ends(steps, KeyboardInterrupt), **TINY)
    # Said outright what `auto` means here: keys of the engine may change between a run and its resumption.
    same = {"engine.precision": "float32", "engine.compile": False}
    resumed = train_recipe(NAME, folder=stopped, device="cpu", resume=True, **TINY, **same)
    assert resumed.status == "finished"
    untimed = [
        [{**r.to_dict(), "seconds": 0, "images_per_second": 0, "elapsed": 0} for r in run.records]
        for run in (whole, resumed)
    ]
    assert untimed[0] == untimed[1]
    for file in ("last", "best"):
        a, b = (load(folder / f"{file}.safetensors")[0] for folder in (whole.folder, stopped))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_from_training_to_the_page(run_folder: Path, tmp_path: Path) -> None:
    """Every command of a row, in order."""
    flatrock("train", NAME, *WORDS, "--run-dir", run_folder, "--device", "cpu")
    for which in ("auto", "last"):
        flatrock("eval", run_folder, "--which", which, "--device", "cpu", "--no-doubt")
    flatrock("results", run_folder, "--out", tmp_path / "rows.json")
    (row,) = read_rows(tmp_path / "rows.json") or []
    assert (row.recipe, row.protocol, row.recipe_hash) == (NAME, "cifar10_short", recipe_hash(load_recipe(NAME, TINY)))
    assert set(row.scores) == {"best", "last"}
    assert set(row.scores["best"].right) == {"clean", "pgd-2", "cw-2"}
    assert "train.epochs: 2 instead of 30" in row.changes
    assert any(change.startswith("evaluate.attacks: ['pgd-2', 'cw-2'] instead of") for change in row.changes)
    assert not any(change.startswith("engine") for change in row.changes), "it decides no number"
    flatrock("report", tmp_path / "rows.json", "--out", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    (changed,) = [line for line in text.splitlines() if line.startswith("- TRADES + AWP (seed 0): changed, ")]
    assert "; train.epochs: 2 instead of 30; " in changed and changed.endswith("; not compared.")
