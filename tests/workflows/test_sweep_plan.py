"""The runs of a sweep: what words mean, which folders they get, and that every fault is told before any work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flatrock.core.errors import ConfigError
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.workflows.sweep import Shard, seconds_left
from flatrock.workflows.sweep_plan import grid_of, plan_sweep


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(word: str) -> Any:
    """What a word says that has no fault."""
    faults: list[str] = []
    said = grid_of([word], faults)
    assert faults == []
    return said


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("optimizer.lr=0.05,0.1", [0.05, 0.1]),
        ("threat.eps=4/255, 8/255", [4 / 255, 8 / 255]),
        ("objective.name=at,trades", ["at", "trades"]),
        ("schedule.milestones=[50,75],[100, 150]", [[50, 75], [100, 150]]),
        ("flatness=[],[{name: awp, gamma: 0.01}]", [[], [{"name": "awp", "gamma": 0.01}]]),
        ("objective={name: trades, beta: 6},{name: at}", [{"name": "trades", "beta": 6}, {"name": "at"}]),
        ("""evaluate.attacks=["a,b"],['c]']""", [["a,b"], ["c]"]]),
        ("model.weights=null,runs/a", [None, "runs/a"]),
    ],
)
def test_values_between_commas(word: str, values: list[Any]) -> None:
    assert read(word) == ({word.partition("=")[0]: values}, {})


@pytest.mark.parametrize(
    ("word", "value"), [("train.epochs=3", 3), ("schedule.milestones=[50,75]", [50, 75]), ("flatness=[]", [])]
)
def test_a_single_value_is_an_override(word: str, value: Any) -> None:
    assert read(word) == ({}, {word.partition("=")[0]: value})


def test_words_that_are_none_are_told_at_once() -> None:
    faults: list[str] = []
    assert grid_of(["nonsense", "a=1,,2", "b=1", "b=2,3", "c=[1,2"], faults) == ({}, {"b": 1})
    said = "\n".join(faults)
    assert "an override is written key=value" in said and "'a=1,,2' has a value that is empty" in said
    assert "b is given twice; write all of its values behind one key=" in said and "not readable YAML" in said


def test_every_combination_and_seed_in_a_folder_named_after_it() -> None:
    grid = {"threat.eps": [0.1, 4 / 255], "objective.name": ["at", "trades"]}
    plan = plan_sweep("digits_at", grid, {"train.epochs": 3}, seeds=[0, 5], runs_dir=Path("runs/x"))
    assert [setting.name for setting in plan.settings] == [
        "threat.eps=0.1 objective.name=at",
        "threat.eps=0.1 objective.name=trades",
        "threat.eps=4/255 objective.name=at",
        "threat.eps=4/255 objective.name=trades",
    ]
    assert [str(run.folder) for run in plan.settings[3].runs] == [
        "runs/x/objective.name=trades-threat.eps=4_255-seed0",
        "runs/x/objective.name=trades-threat.eps=4_255-seed5",
    ]
    turned = plan_sweep("digits_at", dict(reversed(grid.items())), {"train.epochs": 3}, seeds=[5, 0])
    assert {run.folder.name for run in turned.runs} == {run.folder.name for run in plan.runs}
    assert turned.runs_dir == Path("runs/digits_at-sweep")
    words = {"threat.eps": 4 / 255, "objective.name": "trades", "train.epochs": 3, "seed": 5}
    assert recipe_hash(plan.runs[-1].recipe) == recipe_hash(load_recipe("digits_at", words))
    assert all(run.left() == ["train", "best"] for run in plan.runs) and not Path("runs").exists()


def test_folders_of_long_and_odd_values_are_names_that_differ() -> None:
    methods = [[{"name": "awp", "gamma": gamma}, {"name": "swa", "decay": 0.9}] for gamma in (0.01, 0.02)]
    plan = plan_sweep("digits_trades", {"flatness": [[], *methods], "optimizer.weight_decay": [0, 1e-4]}, {})
    names = [run.folder.name for run in plan.runs]
    assert len(set(names)) == 6 and all(len(name) < 120 and name.endswith("-seed0") for name in names)
    assert not any(set(name) & set(" {}[]/:,'") for name in names)


STRUCTURED: dict[str, list[Any]] = {
    "flatness": [[], ["awp"], [{"name": "awp", "gamma": 0.01}, "swa"]],
    "objective": [{"name": "at"}, {"name": "trades", "beta": 3}],
}


def test_folders_of_structured_values_can_be_read() -> None:
    plan = plan_sweep("digits_at", STRUCTURED, {})
    names = [re.sub("-[0-9a-f]{8}-", "-DIGEST-", run.folder.name) for run in plan.runs]
    assert names == [
        "flatness=none-objective=at-DIGEST-seed0",
        "flatness=none-objective=trades_beta=3-DIGEST-seed0",
        "flatness=awp-objective=at-DIGEST-seed0",
        "flatness=awp-objective=trades_beta=3-DIGEST-seed0",
        "flatness=awp_gamma=0.01+swa-objective=at-DIGEST-seed0",
        "flatness=awp_gamma=0.01+swa-objective=trades_beta=3-DIGEST-seed0",
    ]
    assert plan.runs[2].folder.name == "flatness=awp-objective=at-e6809352-seed0"
    steps = plan_sweep("digits_at", {"schedule.milestones": [[5, 7], [10]]}, {"schedule.name": "piecewise"})
    assert [run.folder.name.rsplit("-", 2)[0] for run in steps.runs] == [
        "schedule.milestones=5+7",
        "schedule.milestones=10",
    ]


def test_a_sweep_with_folders_of_older_names_goes_on_in_them() -> None:
    older = Path("runs/digits_at-sweep/flatness=_awp_-objective=_name_at_-e6809352-seed0")
    older.mkdir(parents=True)
    plan = plan_sweep("digits_at", STRUCTURED, {}, seeds=[0, 1])
    assert [run.folder.name for run in plan.settings[2].runs] == [
        older.name,
        "flatness=awp-objective=at-e6809352-seed1",
    ]


def test_seeds_alone_are_a_sweep_of_one_setting() -> None:
    plan = plan_sweep("digits_at", {}, {}, seeds=[0, 1])
    assert [run.folder.name for run in plan.runs] == ["digits_at-seed0", "digits_at-seed1"]
    assert [setting.name for setting in plan.settings] == ["as it is"]


def test_all_faults_of_all_points_are_told_at_once() -> None:
    grid = {"optimizer.lr": [0.1, -1], "objective.name": ["at", "tradse"], "train.batch_size": [64, 10**6]}
    with pytest.raises(ConfigError) as caught:
        plan_sweep("digits_at", grid, {"train.epoch": 3})
    said = str(caught.value)
    assert said.startswith("nothing was begun:")
    for fault in ("optimizer.lr", "tradse", "train.epoch", "batch_size=1000000"):
        assert fault in said, said
    assert "optimizer.lr=-1 objective.name=at" in said and "and" in said
    assert said.count("train.epoch:") == 1, "what is wrong with all of them is told once"


@pytest.mark.parametrize(
    ("grid", "overrides", "seeds", "told"),
    [
        ({"seed": [0, 1]}, {}, [], "seeds are given with --seeds"),
        ({}, {}, [], "nothing is swept"),
        ({"optimizer.lr": [0.1]}, {}, [3], "nothing is swept"),
        ({"optimizer.lr": 0.1}, {}, [], "a grid has a list of values for each key, got 0.1"),
        ({"optimizer.lr": "0.1"}, {}, [], "a grid has a list of values"),
        ({"optimizer__lr": [0.1, 0.2]}, {"optimizer.lr": 1}, [], "both in the grid and an override"),
        ({"optimizer.lr": [0.1, 0.2, 0.1]}, {}, [], "has a value twice"),
        ({"optimizer.lr": [0.1, torch.nn.Linear(2, 2)]}, {}, [], "values are those that a recipe file can hold"),
        ({"optimizer.lr": [0.1, 0.2]}, {"seed": 3}, [0, 1], "seed=3 and --seeds exclude each other"),
        ({"evaluate.attacks": [["fgsm"], ["pgd-3"]]}, {}, [], "evaluate.attacks decides none here; name all attacks"),
        ({"train.save_seconds": [5, 6]}, {}, [], "the same weights would be trained 2 times: train.save_seconds"),
        (
            {"objective": [{"name": "trades"}, {"name": "trades", "beta": 6}, {"name": "trades", "beta": 3}]},
            {},
            [],
            "the same weights would be trained 2 times: objective decides",
        ),
        ({"flatness": [["awp"], [{"name": "awp", "gamma": 0.005}]]}, {}, [], "would be trained 2 times: flatness"),
    ],
)
def test_sweeps_that_are_none(grid: Any, overrides: dict[str, Any], seeds: list[int], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_sweep("digits_at", grid, overrides, seeds=seeds)
    assert told in str(caught.value)


def test_a_fault_of_the_grid_hides_none_of_the_recipe() -> None:
    grid = {"optimizer.lr": [0.1, 0.1], "seed": [0, 1], "objective.name": ["at", "tradess"]}
    with pytest.raises(ConfigError) as caught:
        plan_sweep("digits_at", grid, {"optimizer.momentom": 0.9}, known=["seeds: no"])
    said = str(caught.value)
    for fault in ("seeds: no", "optimizer.lr has a value twice", "given with --seeds", "'tradess'", "'momentom'"):
        assert said.count(fault) == 1, said
    assert "nothing is swept" not in said


def test_a_helper_that_is_not_there_is_to_be_made_first() -> None:
    with pytest.raises(
        ConfigError, match="there is no run runs/digits_standard; make it first: flatrock train digits_standard"
    ):
        plan_sweep("digits_hat", {"optimizer.lr": [0.1, 0.2]}, {})


def test_shards_share_all_runs_and_have_none_in_common() -> None:
    plan = plan_sweep("digits_at", {"optimizer.lr": [0.1, 0.2, 0.3]}, {}, seeds=[0, 1, 2])
    parts = [Shard.of(f"{i}/4").part(plan.runs) for i in (1, 2, 3, 4)]
    assert sorted(run.folder for part in parts for run in part) == sorted(run.folder for run in plan.runs)
    assert [len(part) for part in parts] == [3, 2, 2, 2]


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/0", "-1/4", ""])
def test_shards_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"shard must be i/n with i from 1 to n, such as 1/4"):
        Shard.of(text)


def test_the_time_of_many_settings_follows_from_some(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_sweep("digits_at", {"train.epochs": list(range(1, 18))}, {}, seeds=[0, 1])
    asked: list[int] = []

    def estimate(recipe: Any, *, device: Any) -> Any:
        asked.append(recipe.train.epochs)
        return type("Cost", (), {"seconds": 10.0})()

    monkeypatch.setattr("flatrock.workflows.sweep.estimate", estimate)
    assert seconds_left(plan, plan.runs, torch.device("cpu")) == (340.0, 6)
    assert asked == [1, 4, 7, 10, 13, 16]
    assert seconds_left(plan, [], torch.device("cpu")) == (0, 0)


def test_a_setting_whose_time_cannot_be_told_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One too large for the memory is a run that fails, in its turn."""
    plan = plan_sweep("digits_at", {"train.epochs": [1, 2]}, {})

    def estimate(recipe: Any, *, device: Any) -> Any:
        if recipe.train.epochs == 2:
            raise MemoryError
        return type("Cost", (), {"seconds": 10.0})()

    monkeypatch.setattr("flatrock.workflows.sweep.estimate", estimate)
    assert seconds_left(plan, plan.runs, torch.device("cpu")) == (20.0, 2), "taken to be like the other"
    assert seconds_left(plan, plan.runs[1:], torch.device("cpu")) == (None, 1)
