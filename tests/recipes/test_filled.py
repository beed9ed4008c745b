"""A recipe in full: what it leaves unsaid is known, recorded and compared, and changes neither it nor its hash."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from interrupted import Ends

from flatrock.attacks.catalog import ATTACKS, describe
from flatrock.core.errors import StateError
from flatrock.core.threat import THREATS
from flatrock.flatness.awp import AWP
from flatrock.flatness.catalog import FLATNESS
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.recipes.filled import in_full, same_training, settings, unlike
from flatrock.recipes.load import load_recipe, recipe_names
from flatrock.recipes.pieces import build_attack, recipe_hash
from flatrock.recipes.text import recipe_text
from flatrock.workflows.train import train_recipe

SMALL: dict[str, Any] = {"train.epochs": 1, "data.limit": 200, "objective.name": "trades"}


def options(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in ("name", "bn_mode")}


@pytest.mark.parametrize("name", recipe_names())
def test_what_is_filled_in_is_what_was_in_effect(name: str) -> None:
    recipe, threat = load_recipe(name), load_recipe(name).threat
    full = in_full(recipe)
    for key, value in recipe.resolved().items():
        given = value if isinstance(value, dict) else {}
        assert all(full[key][k] == v for k, v in given.items() if v is not None), key
    objective = OBJECTIVES.make(recipe.objective.name, **options(full["objective"]))
    assert objective == OBJECTIVES.make(recipe.objective.name, **recipe.objective.options)
    for method, section in zip(recipe.flatness, full["flatness"], strict=True):
        made, entry = FLATNESS.make(method.name, **options(section)), FLATNESS.entry(method.name)
        assert made == FLATNESS.make(method.name, **method.options)
        assert {*entry.options()} == {*options(section)}, "every option is told"
    if recipe.attack.name != "none":
        made, known = ATTACKS.make(recipe.attack.name, **options(full["attack"])), build_attack(recipe)
        ball = THREATS[threat.norm](threat.eps)
        assert known is not None and describe(made, ball) == describe(known, ball)


def test_every_named_thing_has_its_defaults() -> None:
    changes = {"objective.name": "trades", "flatness": ["awp", {"name": "rat", "eta": 0.3}]}
    full = in_full(load_recipe("digits_at", {**changes, "optimizer.name": "entropy_sgd", "attack.step_size": None}))
    assert full["objective"] == {"name": "trades", "beta": 6.0, "forwards": "paper", "label_smoothing": 0.0}
    awp, rat = full["flatness"]
    assert awp == {"name": "awp", **vars(AWP())} and (rat["eta"], rat["sigma"], rat["cc"]) == (0.3, 1e-4, None)
    assert full["attack"]["step_size"] == 0.2 / 4, "in the place of null: that of the threat"
    assert (full["optimizer"]["inner_lr"], full["schedule"]["peak"]) == (0.1, 0.3)
    assert not {"params", "seed"} & full["optimizer"].keys()
    network = in_full(load_recipe("cifar10_short_at"))["model"]
    assert (network["name"], network["bn_momentum"]) == ("preact_resnet18", 0.1)
    assert in_full(load_recipe("digits_gat", {"objective.weight": 3}))["attack"]["weight"] == 3


def test_defaults_of_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from flatrock.objectives.trades import TRADES\nfrom torch import nn\n"
        "class Loss(TRADES):\n    def __init__(self, *, beta: float = 2.0): super().__init__(beta=beta)\n"
        "    def loss(self, views, y): return super().loss(views, y)\n"
        "def net(width: int = 8, *, num_classes: int) -> nn.Module:\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_classes))\n"
    )
    recipe = load_recipe("digits_at", {"objective.name": "mine:Loss", "model.name": "mine:net"})
    full = in_full(recipe)
    assert full["objective"] == {"name": "mine:Loss", "beta": 2.0}
    assert (full["model"]["width"], full["model"]["num_classes"]) == (8, 10)
    monkeypatch.chdir("/")
    assert in_full(recipe)["objective"] == {"name": "mine:Loss"}, "code that is not here has none that are known"


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ({}, {"objective.beta": 6}, True),
        ({"objective.beta": 3}, {"objective.beta": 6}, False),
        ({"flatness": ["awp"]}, {"flatness": [{"name": "awp", "gamma": 0.005, "step_size": None}]}, True),
        ({"flatness": ["awp"]}, {}, False),
        ({"attack.step_size": None}, {"attack.step_size": 0.05}, True),
        ({"attack.step_size": None, "threat.eps": 0.1}, {"attack.step_size": 0.05, "threat.eps": 0.1}, False),
        ({}, {"train.save_seconds": 5, "evaluate.attacks": ["fgsm"]}, True),
    ],
)
def test_what_trains_the_same(one: dict[str, Any], other: dict[str, Any], alike: bool) -> None:
    first, second = (load_recipe("digits_at", {"objective.name": "trades", **changes}) for changes in (one, other))
    assert (same_training(first) == same_training(second)) is alike


@pytest.mark.parametrize("name", ["digits_standard", "digits_at"])
def test_options_of_an_attack_that_is_not_made_decide_nothing(name: str) -> None:
    first, second = (load_recipe(name, {"attack.steps": steps}) for steps in (5, 7))
    assert (same_training(first) == same_training(second)) is (name == "digits_standard")


def test_check_prints_every_default_and_a_copy_stays_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("digits_at", {"objective.name": "trades", "flatness": ["awp", "rat"], "name": "mine"})
    text = recipe_text(recipe)
    (tmp_path / "mine.yaml").write_text(text)
    assert recipe_hash(load_recipe(tmp_path / "mine.yaml")) == recipe_hash(recipe)
    assert yaml.safe_load(text) == recipe.resolved()
    comments = re.findall(r"^# (\S+), by default: (\{.*?\})$", re.sub(r"\n# (?!\S+, by default)", " ", text), re.M)
    said = {f"{place}.{key}": value for place, found in comments for key, value in yaml.safe_load(found).items()}
    assert (said["objective.beta"], said["flatness.awp.gamma"], said["schedule.peak"]) == (6.0, 0.005, 0.3)
    assert said["flatness.awp.step_size"] is None
    assert max(map(len, text.splitlines())) <= 120
    filled = load_recipe(tmp_path / "mine.yaml", said)
    assert {**filled.resolved(), "about": {}} == {**in_full(recipe), "about": {}}, "said aloud, they are what it is"
    assert same_training(filled) == same_training(recipe)


def test_settings_are_in_the_record_of_a_run_once(tmp_path: Path) -> None:
    recipe = load_recipe("digits_at", SMALL)
    with pytest.raises(KeyboardInterrupt):
        train_recipe(recipe, folder=tmp_path / "run", device="cpu", progress=Ends(2, KeyboardInterrupt))
    run = train_recipe(tmp_path / "run", resume=True, device="cpu")
    info = json.loads((run.folder / "run.json").read_text())
    kept = info["provenance"]["settings"]
    assert kept == settings(recipe) and (kept["objective"]["beta"], kept["attack"]["start"]) == (6.0, "gaussian")
    assert kept["select"]["attack"]["step_size"] == 0.05 and "about" not in kept
    assert info["provenance"]["recipe_hash"] == recipe_hash(recipe)
    assert [again for again in info["resumed"] if "settings" in again] == [] and len(info["resumed"]) == 1
    with pytest.raises(StateError) as caught:
        train_recipe("digits_at", folder=run.folder, resume=True, **SMALL, **{"objective.beta": 6, "flatness": "awp"})
    said = str(caught.value)
    assert "objective.beta: 6.0 (by default) there, 6 asked for" in said and "None" not in said
    assert "flatness: [] (by default) there, ['awp'] asked for" in said and "name the run alone to continue" in said


def test_differences_name_what_is_in_effect() -> None:
    trades, at = (load_recipe("digits_at", {"objective.name": name}) for name in ("trades", "at"))
    beta = load_recipe("digits_at", {"objective.name": "trades", "objective.beta": 3})
    assert unlike(trades, trades) == []
    assert unlike(trades, beta) == ["objective.beta: 6.0 (by default) there, 3 asked for"]
    assert "objective.beta: none there, 3 asked for" in unlike(at, beta)


def test_recipes_of_one_hash_do_not_differ() -> None:
    """A key that came later is not in the hash at the value it had all the time, whoever says it."""
    plain = load_recipe("digits_at")
    aloud = load_recipe("digits_at", {"objective.label_smoothing": 0})
    assert recipe_hash(plain) == recipe_hash(aloud)
    assert unlike(plain, aloud) == unlike(aloud, plain) == []
