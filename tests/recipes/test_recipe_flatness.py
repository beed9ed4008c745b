"""Flatness methods and optimizers in recipes: short forms, overrides, hashes, and what is refused and why."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatrock.core.errors import ConfigError
from flatrock.recipes.build import build_flatness, build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.workflows.cost import estimate


def faults(name: str, overrides: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, overrides)
    return list(caught.value.faults)


def names(recipe: Any) -> list[str]:
    return [f.name for f in recipe.flatness]


# Spelling


@pytest.mark.parametrize(
    "spelling",
    ["awp", {"name": "awp"}, ["awp"], [{"name": "awp"}]],
)
def test_one_method_may_be_written_short(spelling: Any) -> None:
    recipe = load_recipe("digits_trades", {"flatness": spelling})
    assert recipe_hash(recipe) == recipe_hash(load_recipe("digits_trades", ["flatness=[{name: awp}]"]))
    assert build_flatness(recipe)["awp"].gamma == 5e-3  # type: ignore[attr-defined]


def test_the_recipe_of_the_readme(tmp_path: Path) -> None:
    file = tmp_path / "stacked.yaml"
    file.write_text(
        "base: digits_trades\nobjective: {name: trades, beta: 6}\nflatness:\n  - {name: awp, gamma: 5.0e-3}\n"
        "  - {name: rat, order: 2, eta: 0.2}\n  - {name: swa, decay: 0.995}\n"
    )
    assert names(load_recipe(file)) == ["awp", "rat", "swa"]


def test_options_of_a_method_can_be_overridden_one_by_one() -> None:
    both = {"flatness": [{"name": "awp", "warmup": 3}, {"name": "rat", "eta": 0.1}]}
    recipe = load_recipe("digits_trades", {**both, "flatness.awp.gamma": "1/100"})
    assert recipe.flatness[0].options == {"warmup": 3, "gamma": 0.01}
    assert recipe.flatness[1].options == {"eta": 0.1}
    with pytest.raises(ConfigError, match=r"flatness has no 'sam', it has \['awp', 'rat'\]"):
        load_recipe("digits_trades", {**both, "flatness.sam.rho": 1})


def suggested(fault: str) -> str:
    """The override a message ends with, as a shell reads it."""
    (word,) = shlex.split(fault[fault.index("'flatness=") :])
    return word


def test_options_of_a_method_that_is_not_there_say_how_it_gets_there() -> None:
    (fault,) = faults("digits_at", {"flatness.swa.decay": 0.9})
    assert fault.startswith(
        "override 'flatness.swa.decay': the recipe's flatness has no 'swa', it has []; add it with "
    )
    assert suggested(fault) == "flatness=[{name: swa, decay: 0.9}]"
    assert load_recipe("digits_at", [suggested(fault)]).flatness[0].options == {"decay": 0.9}
    first, second = faults("digits_at_awp", {"flatness.swa.decay": np.float64(0.9), "flatness.swa.ramp": True})
    assert suggested(first) == suggested(second) == "flatness=[awp, {name: swa, decay: 0.9, ramp: true}]"
    stacked = load_recipe("digits_at_awp", [suggested(first)])
    assert stacked.flatness[0].options == load_recipe("digits_at_awp").flatness[0].options, "it keeps its options"
    (fault,) = faults("digits_at", {"flatness.awpp.gamma": 0.1})
    assert "unknown flatness method 'awpp'; known: awp, " in fault and fault.endswith("did you mean 'awp'?")


def test_several_names_in_one_are_a_list(tmp_path: Path) -> None:
    (fault,) = faults("digits_at", {"flatness": "awp,swa"})
    assert fault.startswith("flatness[0] awp,swa: several methods are a list; write ")
    assert suggested(fault) == "flatness=[awp, swa]"
    assert names(load_recipe("digits_at", [suggested(fault)])) == ["awp", "swa"]
    (tmp_path / "two.yaml").write_text("base: digits_at\nflatness: awp, swa\n")
    assert suggested(faults(str(tmp_path / "two.yaml"), {})[0]) == "flatness=[awp, swa]"


def test_a_list_says_which_methods_and_keeps_their_options(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text(
        "base: digits_trades\nflatness: [{name: awp, warmup: 3}, {name: rat, eta: 0.1, sigma: 0}]\n"
    )
    (tmp_path / "above.yaml").write_text("base: below\nflatness: [{name: rat, order: 1}, swa]\n")
    recipe = load_recipe(tmp_path / "above.yaml")
    assert names(recipe) == ["rat", "swa"]
    assert recipe.flatness[0].options == {"eta": 0.1, "sigma": 0, "order": 1}


def test_without_flatness_nothing_changes_its_name() -> None:
    """Runs made before there were flatness methods can still be resumed."""
    recipe = load_recipe("digits_at")
    assert "flatness" not in recipe.training_keys()
    assert recipe_hash(recipe) == recipe_hash(load_recipe("digits_at", {"flatness": []}))
    assert recipe_hash(recipe) != recipe_hash(load_recipe("digits_at", {"flatness": "awp"}))


# Refusals


@pytest.mark.parametrize(
    ("recipe", "overrides", "fault"),
    [
        ("digits_at", {"flatness": "apw"}, "flatness[0] apw: unknown flatness method 'apw'"),
        ("digits_at", {"flatness": {"name": "awp", "gama": 1}}, "unknown option of flatness method 'awp': 'gama'"),
        ("digits_at", {"flatness": {"name": "awp", "gamma": -1}}, "awp gamma must be a number >= 0, got -1"),
        ("digits_at", {"flatness": ["awp", "awp"]}, "flatness[1] awp: the method is there twice; keep one"),
        ("digits_at", {"flatness": ["awp", "sam"]}, "awp and sam both move the weights the loss sees; keep one"),
        (
            "digits_standard",
            {"flatness": "rat"},
            "flatness rat: it needs adversarial inputs",
        ),
        (
            "digits_standard",
            {"flatness": "s2o"},
            "flatness s2o: it needs adversarial inputs",
        ),
        (
            "moons_at",
            {"flatness": {"name": "rat", "noise_on": "conv"}},
            "parameter that 'conv' stands for",
        ),
        (
            "digits_at",
            {"flatness": "sam", "optimizer.name": "entropy_sgd"},
            "flatness sam: step 'after' puts the weights back before the optimizer's inner loop",
        ),
        (
            "digits_at",
            {"flatness": {"name": "trh", "layers": "full", "clean": "full"}},
            "flatness[0] trh: ",
        ),
        (
            "digits_mart",
            {"objective.form": "code", "flatness": "trh"},
            "flatness[0] trh: trh is the trace of MART's exact loss",
        ),
        (
            "digits_alp",
            {"objective.stop_clean": True, "flatness": {"name": "trh", "clean": "full"}},
            "trh clean: full is not the trace of a loss with stop_clean: true",
        ),
        (
            "digits_at",
            {"flatness": {"name": "rat", "terms": "exact", "sigma": 0.01}, "train.micro_batch": 8},
            "flatness rat: it runs the network on the whole batch itself; leave out train.micro_batch",
        ),
        (
            "moons_at",
            {"flatness": {"name": "trh", "layers": "full", "clean": "full"}, "train.micro_batch": 8},
            "flatness trh: it runs the network on the whole batch itself; leave out train.micro_batch",
        ),
        (
            "digits_at",
            {"optimizer": {"name": "entropy_sgd", "outer": "paper", "gamma": 0}},
            "gamma 0 with outer: paper moves nothing",
        ),
        ("digits_at", {"optimizer.name": "entropy"}, "unknown optimizer 'entropy'; known: adamw, entropy_sgd, sgd"),
        ("digits_at", {"optimizer.steps": 5}, "optimizer.steps: unknown key 'steps'"),
        (
            "digits_at",
            {"optimizer": {"name": "sgld", "momentum": 0.9}},
            "sgld has no momentum, got 0.9; set optimizer.momentum=0",
        ),
        ("digits_at", {"optimizer.name": "entropy_sgd", "optimizer.steps": 0}, "got 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(recipe: str, overrides: dict[str, Any], fault: str) -> None:
    found = faults(recipe, overrides)
    assert len(found) == 1
    assert fault in found[0]


def test_all_faults_of_flatness_come_at_once() -> None:
    flatness = [{"name": "awp", "gamma": -1}, {"name": "nothing"}, {"name": "swa", "decay": 2}]
    assert len(faults("digits_at", {"flatness": flatness, "train.epochs": 0})) == 4


@pytest.mark.parametrize("flatness", ["awp", "sam", "swa", {"name": "trh", "weight": 0.1}])
def test_training_without_attack_takes_the_others(flatness: Any, tmp_path: Path) -> None:
    job = build_job(load_recipe("digits_standard", {"flatness": flatness}), folder=tmp_path)
    assert len(job.flatness) == 1


# Cost


@pytest.mark.parametrize(
    ("overrides", "forwards"),
    [
        ({}, 8 + 2),
        ({"flatness": ["rat", "trh", "swa", "s2o"]}, 8 + 2),
        ({"flatness": "awp"}, 8 + 2 + 2),
        ({"flatness": {"name": "awp", "alternations": 2, "steps": 3}}, 8 + 2 + 2 * 3 * 2 + 8),
        ({"objective": {"name": "at"}, "flatness": "rat"}, 7 + 2),
        ({"optimizer": {"name": "entropy_sgd", "steps": 3}}, 8 + 3 * 2),
        ({"optimizer": {"name": "entropy_sgd"}}, 8 + 5 * 2),
        ({"attack": {"name": "langevin", "steps": 4}}, 4 + 4 * 2),
        ({"flatness": "awp", "train.micro_batch": 20}, 8 + 2 * (2 + 2)),
        ({"flatness": "awp", "train.micro_batch": 64}, 8 + 2 + 2),
    ],
)
def test_the_estimate_counts_what_a_method_adds(overrides: dict[str, Any], forwards: int) -> None:
    assert estimate(load_recipe("digits_trades", overrides), device=torch.device("cpu")).forwards_per_step == forwards
