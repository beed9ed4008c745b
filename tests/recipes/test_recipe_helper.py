"""Recipes of HAT: a helper that is missing, unfinished or does not fit, what the hash knows, what is said before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.core.errors import ConfigError, FlatrockError, StateError
from flatrock.core.tensorfile import load, save
from flatrock.engine.folder import RunFolder
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.schema import Recipe
from flatrock.workflows.bench import bench
from flatrock.workflows.cost import estimate
from flatrock.workflows.evaluate import evaluate_run
from flatrock.workflows.results import collect_run, other_sources
from flatrock.workflows.train import train_recipe

SMALL = {"data.limit": 512, "train.batch_size": 64, "train.epochs": 3, "train.tensorboard": False, "select.size": 40}
FEW = {**SMALL, "train.max_steps": 2, "attack.steps": 2, "select.attack": "pgd-2"}


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network trained on digits without attacks. Copy it, do not change it."""
    folder = tmp_path_factory.mktemp("helpers") / "digits_standard"
    train_recipe("digits_standard", folder=folder, device="cpu", **SMALL)
    return folder


def hat(helper: Path | str, **changes: Any) -> Recipe:
    return load_recipe("digits_hat", {**FEW, "objective.helper": str(helper), **changes})


def fault(helper: Path | str, tmp_path: Path, **changes: Any) -> str:
    """What building says; it must leave nothing behind."""
    with pytest.raises(FlatrockError) as caught:
        build_job(hat(helper, **changes), folder=tmp_path / "never")
    assert not (tmp_path / "never").exists()
    return str(caught.value)


# A helper that is not there, or not the right one


@pytest.mark.parametrize(
    ("helper", "cure"),
    [
        ("runs/cifar10_short_standard", "train it first: flatrock train cifar10_short_standard"),
        ("else/digits_standard", "train it first: flatrock train digits_standard --run-dir else/digits_standard"),
        ("runs/mine", "train one without attacks (objective: {name: standard}) and name its folder"),
    ],
)
def test_a_missing_helper_says_how_to_train_it(
    helper: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = fault(helper, tmp_path)
    assert text == f"objective.helper: there is no run folder or checkpoint {helper}; {cure}"


def test_a_path_is_relative_to_the_working_directory(
    standard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(standard.parent)
    job = build_job(hat("digits_standard"), folder=tmp_path / "run")
    assert job.helper is not None
    assert job.helper.network.input_shape == (1, 8, 8)


def test_a_run_that_is_not_finished_helps_only_by_a_checkpoint(standard: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(standard, folder)
    RunFolder(folder).write_info(status="running")
    assert (
        "half is not finished (its process is gone); train on with --resume, or name one of its checkpoints"
        in fault(folder, tmp_path)
    )
    job = build_job(hat(folder / "last.safetensors"), folder=tmp_path / "run")
    assert job.provenance["helper"]["checkpoint"] == "last.safetensors"


def test_a_helper_must_take_the_same_inputs(standard: Path, tmp_path: Path) -> None:
    moons = tmp_path / "moons"
    train_recipe("moons_standard", folder=moons, device="cpu", train__epochs=1, train__tensorboard=False)
    text = fault(moons, tmp_path)
    assert "takes inputs (2,), not (1, 8, 8); name a run on the same kind of data" in text


@pytest.mark.parametrize("change", ["names", "count"])
def test_a_helper_must_know_the_same_classes(standard: Path, tmp_path: Path, change: str) -> None:
    tensors, meta = load(standard / "last.safetensors")
    names = meta["class_names"]
    if change == "count":
        meta["recipe"]["model"]["num_classes"] = 9
        # Which has any number of classes.
        meta["recipe"]["data"] = {**meta["recipe"]["data"], "name": "folder", "channels": 1}
        tensors = {k: v[:9].clone() if "head." in k else v for k, v in tensors.items()}
    meta["class_names"] = names[::-1] if change == "names" else names[:9]
    save(tmp_path / "other.safetensors", tensors, meta)
    text = fault(tmp_path / "other.safetensors", tmp_path)
    assert f"has {len(meta['class_names'])} classes {meta['class_names']}, not 10 {names}" in text
    assert text.endswith("name a run on the same classes")


def test_a_damaged_helper_is_refused(standard: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(standard, folder)
    best = folder / "best.safetensors"
    best.write_bytes(best.read_bytes()[:-3])
    assert "is damaged" in fault(folder, tmp_path)


def test_without_a_name_it_is_a_fault_of_the_recipe() -> None:
    with pytest.raises(ConfigError, match="hat helper is missing") as caught:
        load_recipe("digits_at", {"objective": {"name": "hat"}, "threat.eps": "0.5/0"})
    assert len(caught.value.faults) == 2


# What is said in advance


def test_check_tells_the_cost_and_then_the_missing_helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["check", "digits_hat", "--device", "cpu"])
    assert done.exit_code == 2
    text = " ".join(done.output.split())
    assert "11 forward passes of the network per step" in text, "8 of the attack and 3 of the loss"
    assert "is sound, but cannot be trained yet" in text
    assert "train it first: flatrock train digits_standard" in text


def test_check_of_a_recipe_whose_helper_is_there(standard: Path) -> None:
    done = CliRunner().invoke(app, ["check", "digits_hat", f"objective.helper={standard}", "--device", "cpu"])
    assert done.exit_code == 0, done.output


def test_the_helpers_forward_is_a_third_of_a_training_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatrock.workflows.cost._timed_pass", lambda model, x: 0.2)
    few = {**FEW, "train.max_steps": None, "select.every": 1000}
    hat, trades = (
        estimate(load_recipe(name, few), device=torch.device("cpu")) for name in ("digits_hat", "digits_trades")
    )
    assert hat.total_flops is not None and trades.total_flops is not None
    assert (hat.forwards_per_step, trades.forwards_per_step) == (3 + 3, 3 + 2)
    steps = [3 * 2 + 3 * 3 + 1, 3 * 2 + 2 * 3]
    assert hat.total_flops / trades.total_flops == pytest.approx(steps[0] / steps[1], rel=0.01)


def test_the_cost_of_a_step_is_measured(standard: Path) -> None:
    keys = {"data.limit": 200, "train.batch_size": 64, "attack.steps": 2}
    trades, helped = bench([load_recipe("digits_trades", keys), hat(standard, **keys)], rounds=1, steps=1).costs
    assert (helped.objective, helped.findings) == ("hat", ())
    work = [c.tflops * c.ms_per_step for c in (trades, helped)]
    assert work[1] / work[0] == pytest.approx((3 * 2 + 3 * 3 + 1) / (3 * 2 + 2 * 3), rel=0.1)


def test_on_at_the_attack_follows() -> None:
    assert (hat("here").attack.name, hat("here", **{"objective.form": "at"}).attack.name) == ("kl-pgd", "pgd")


# What the hash knows


def test_the_hash_does_not_know_where_the_helper_lies() -> None:
    assert recipe_hash(hat("here")) == recipe_hash(hat("there"))
    assert recipe_hash(hat("here", **{"objective.reach": 1})) != recipe_hash(hat("here"))
    assert hat("here").resolved()["objective"]["helper"] == "here"
    assert "helper" not in hat("here").training_keys()["objective"]


def test_a_trained_run_needs_its_helper_no_more(standard: Path, tmp_path: Path) -> None:
    helper = tmp_path / "helper"
    shutil.copytree(standard, helper)
    run = train_recipe(hat(helper), folder=tmp_path / "run", device="cpu")
    shutil.rmtree(helper)
    assert 0 <= evaluate_run(run, attacks=["fgsm"], which="last").robust <= 1
    row = collect_run(run.folder)
    assert row.provenance["helper"]["recipe"] == "digits_standard"
    assert not any(str(tmp_path) in change for change in row.changes), "where it lay is no change"
    with pytest.raises(StateError, match="there is no run folder or checkpoint"):
        train_recipe(hat(helper), folder=tmp_path / "run", device="cpu", resume=True)


def test_a_helper_chosen_on_the_test_set_is_refused(tmp_path: Path) -> None:
    helper = tmp_path / "digits_standard"
    train_recipe("digits_standard", folder=helper, device="cpu", **{**SMALL, "select.data": "test"})
    assert "was chosen on the test set, and so would be every number that follows" in fault(helper, tmp_path)


def test_results_tell_of_a_helper_the_library_does_not_name(standard: Path, tmp_path: Path) -> None:
    other = tmp_path / "else" / "digits_standard"
    train_recipe("digits_standard", folder=other, device="cpu", **SMALL)
    for helper in (standard, other):
        folder = tmp_path / helper.parent.name
        train_recipe(hat(helper), folder=folder / "run", device="cpu")
        told = [c for c in collect_run(folder / "run").changes if c.startswith("objective.helper")]
        (text,) = told  # trained with fewer samples than the library says
        assert text.startswith("objective.helper: digits_standard, changed (")
        assert text.endswith(") instead of digits_standard")
    whole = load_recipe("digits_hat")
    named = {"recipe": "digits_standard", "recipe_hash": recipe_hash(load_recipe("digits_standard"))}
    assert other_sources(whole, {"helper": named}) == []
    assert other_sources(whole, {"helper": {**named, "recipe": "digits_at"}}) != []
    assert other_sources(whole, {}) == []
    seeded = {**named, "recipe_hash": recipe_hash(load_recipe("digits_standard", ["seed=3"])), "seed": 3}
    assert other_sources(whole, {"helper": seeded}) == [], "the seed of a source is as free as that of the recipe"
    assert len(other_sources(whole, {"helper": {**seeded, "seed": 0}})) == 1


def test_the_library_names_helpers_that_can_be_trained() -> None:
    for name in ("digits_hat", "cifar10_short_hat", "cifar10_short_hat_awp", "cifar10_flagship"):
        recipe = load_recipe(name)
        named = Path(recipe.objective.options["helper"])
        helper = load_recipe(named.name)
        assert named == Path("runs") / helper.name
        assert (helper.objective.name, helper.data, helper.model) == ("standard", recipe.data, recipe.model)
        beta = 4 if name == "cifar10_flagship" else 2.5
        assert (recipe.objective.options["beta"], recipe.objective.options["gamma"]) == (beta, 0.5)
    assert load_recipe("cifar10_short_hat_awp").flatness == load_recipe("cifar10_short_trades_awp").flatness
