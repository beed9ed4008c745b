"""Recipes of GAT: one weight for its loss and its attack, what a base's attack may leave, and what is said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flatrock.attacks.guided import Guided
from flatrock.cli.main import app
from flatrock.core.errors import ConfigError
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.objectives.gat import GAT
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import build_attack, recipe_hash
from flatrock.workflows.cost import estimate

KEYS = ("weight", "rise", "rise_after")


def objective(**changes: Any) -> GAT:
    section = load_recipe("digits_gat", changes).objective
    made = OBJECTIVES.make(section.name, **section.options)
    assert isinstance(made, GAT)
    return made


def attack(**changes: Any) -> Guided:
    made = build_attack(load_recipe("digits_gat", changes))
    assert isinstance(made, Guided)
    return made


@pytest.mark.parametrize("name", ["digits_gat", "cifar10_short_gat"])
def test_the_recipes_have_the_published_constants(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.objective.options == {"weight": 10, "rise": 4, "rise_after": 0.85}
    assert build_attack(recipe) == Guided()
    assert recipe.attack.bn_mode == "eval"


@pytest.mark.parametrize(("key", "value"), [("weight", 5), ("rise", 2), ("rise_after", 0.5)])
def test_the_attack_has_the_weight_of_the_loss(key: str, value: float) -> None:
    changed = {f"objective.{key}": value}
    assert [getattr(attack(**changed), k) for k in KEYS] == [getattr(objective(**changed), k) for k in KEYS]
    assert getattr(attack(**changed), key) == value
    assert recipe_hash(load_recipe("digits_gat", changed)) != recipe_hash(load_recipe("digits_gat"))


def test_a_copied_recipe_still_has_one_weight(tmp_path: Path) -> None:
    """What the attack takes from the loss is written down nowhere, or it would stay when the loss is changed."""
    file = tmp_path / "mine.yaml"
    assert CliRunner().invoke(app, ["cp", "digits_gat", str(file)]).exit_code == 0
    made = build_attack(load_recipe(file, {"objective.weight": 3}))
    assert isinstance(made, Guided)
    assert made.weight == 3


def test_unless_it_says_otherwise() -> None:
    assert attack(**{"attack.weight": 3, "objective.weight": 5}).weight == 3
    assert objective(**{"attack.weight": 3}).weight == 10


def test_other_parts_go_their_own_way() -> None:
    trades = load_recipe("digits_trades", {"attack": {"name": "guided"}})
    assert trades.attack.options == {}
    assert build_attack(trades) == Guided()
    pgd = load_recipe("digits_gat", {"attack": {"name": "pgd", "steps": 3}})
    assert pgd.attack.options == {"steps": 3}


def test_trades_on_the_published_attack() -> None:
    mixed, gat = load_recipe("cifar10_trades_gat_linf"), load_recipe("cifar10_gat_linf")
    assert (mixed.objective.name, mixed.objective.options, mixed.attack.name) == ("trades", {"beta": 6}, "guided")
    assert build_attack(mixed) == build_attack(gat) == Guided()
    others = [{**recipe.training_keys(), "objective": None} for recipe in (mixed, gat)]
    assert others[0] == others[1]


def test_the_attack_follows_from_the_objective() -> None:
    recipe = load_recipe("moons_at", {"objective": {"name": "gat"}, "attack": {"name": "auto"}})
    assert recipe.attack.name == "guided"


def test_options_of_another_attack_are_faults() -> None:
    with pytest.raises(ConfigError, match="2 faults") as caught:
        load_recipe("digits_at", {"objective.name": "gat"})
    assert [fault.split(";")[0] for fault in caught.value.faults] == [
        "attack.steps: unknown key 'steps'",
        "attack.step_size: unknown key 'step_size'",
    ]
    assert all(fault.endswith("(those of the attack that the objective brings)") for fault in caught.value.faults)
    assert load_recipe("digits_at", {"objective.name": "gat", "attack.name": "guided"}).attack.options == {}


def test_faults_are_told_at_once() -> None:
    """A faulty objective does not make options of its attack unknown."""
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits_gat", {"objective.rise": -1, "attack": {"name": "auto", "offset": 2}, "seed": -1})
    starts = ("seed: got -1", "objective: gat rise must be", "attack: guided offset must lie in [0, 1], got 2")
    assert len(caught.value.faults) == 3
    for start in starts:
        assert sum(fault.startswith(start) for fault in caught.value.faults) == 1, start


def test_its_cost_is_that_of_few_passes() -> None:
    cost = estimate(load_recipe("digits_gat"), device=torch.device("cpu"))
    assert cost.forwards_per_step == 4
    assert estimate(load_recipe("digits_trades"), device=torch.device("cpu")).forwards_per_step == 10
