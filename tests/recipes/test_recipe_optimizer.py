"""The optimizer section: what an optimizer lacks is neither in the way nor ignored, wherever it was said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flatrock.core.errors import ConfigError
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.schema import Optimizer

# A base that says all it can of SGD.
BASE = "base: digits_at\noptimizer: {lr: 0.02, momentum: 0.95, nesterov: true, weight_decay: 0.1, l1: 1e-6}\n"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "below.yaml").write_text(BASE)
    return tmp_path / "below.yaml"


def said(section: Optimizer) -> tuple[float, bool]:
    return section.momentum, section.nesterov


@pytest.mark.parametrize("name", ["adamw", "sgld"])
def test_defaults_are_not_in_the_way(name: str, tmp_path: Path) -> None:
    recipe = load_recipe("digits_at", {"optimizer.name": name})
    assert said(recipe.optimizer) == (0.0, False)
    assert recipe_hash(recipe) == recipe_hash(load_recipe("digits_at", {"optimizer": {"name": name, "momentum": 0}}))
    assert type(build_job(recipe, folder=tmp_path).optimizer).__name__.lower() == name
    (tmp_path / "stored.yaml").write_text(yaml.safe_dump(recipe.resolved()))
    assert recipe_hash(load_recipe(tmp_path / "stored.yaml")) == recipe_hash(recipe)


@pytest.mark.parametrize("name", ["sgd", "entropy_sgd"])
def test_those_that_have_momentum_have_its_default(name: str) -> None:
    assert said(load_recipe("digits_at", {"optimizer.name": name}).optimizer) == (0.9, False)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"momentum": 0.9}, "optimizer: adamw has no momentum, got 0.9; set optimizer.momentum=0"),
        ({"nesterov": True}, "optimizer: adamw has no nesterov, got True; set optimizer.nesterov=0"),
        ({"beta": 0.9}, "optimizer.beta: unknown key 'beta'"),
        ({"betas": [0.9, 1.5]}, r"optimizer: adamw betas must lie in [0, 1), got 1.5"),
        ({"weight_decay": -1}, "optimizer.weight_decay: got -1"),
    ],
)
def test_what_is_said_and_not_there_is_refused(keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits_at", {"optimizer": {"name": "adamw", **keys}})
    (found,) = caught.value.faults
    assert fault in found


def test_momentum_of_the_base_goes_with_an_optimizer_that_has_none(base: Path, tmp_path: Path) -> None:
    for over in (["optimizer.name=adamw"], ["optimizer.betas=[0.9, 0.95]", "optimizer.name=adamw"]):
        section = load_recipe(base, over).optimizer
        assert said(section) == (0.0, False)
        assert (section.lr, section.weight_decay, section.l1) == (0.02, 0.1, 1e-6), "said of any optimizer"
    assert said(load_recipe(base, ["optimizer.name=entropy_sgd"]).optimizer) == (0.95, True)
    with pytest.raises(ConfigError, match=r"adamw has no momentum, got 0\.5"):
        load_recipe(base, ["optimizer.name=adamw", "optimizer.momentum=0.5"])
    (tmp_path / "above.yaml").write_text("base: below\noptimizer: {name: adamw, betas: [0.8, 0.9]}\n")
    assert load_recipe(tmp_path / "above.yaml").optimizer.options == {"betas": [0.8, 0.9]}
    back = load_recipe(tmp_path / "above.yaml", ["optimizer.name=sgd"]).optimizer
    assert (said(back), back.options) == ((0.9, False), {})


def test_options_decide_the_hash() -> None:
    def of(**keys: Any) -> str:
        return recipe_hash(load_recipe("digits_at", {"optimizer": {"name": "adamw", **keys}}))

    assert len({of(), of(betas=[0.9, 0.95]), of(eps=1e-6), of(weight_decay=0.1), of(decay_on="weights")}) == 5
    typed = load_recipe("digits_at", ["optimizer={name: adamw, betas: [9/10, 0.95]}"])
    assert recipe_hash(typed) == of(betas=[0.9, 0.95])


def test_what_an_optimizer_keeps_of_its_base_is_as_before() -> None:
    """The recipe below has no momentum, and Entropy-SGD is asked for without a word about it."""
    assert load_recipe("mnist_entropy_sgd").optimizer.momentum == load_recipe("mnist_sgd").optimizer.momentum == 0


@pytest.mark.parametrize("key", ["train.clip_norm", "train.micro_batch"])
def test_later_choices_of_training_are_in_the_hash_where_they_are_made(key: str) -> None:
    plain = recipe_hash(load_recipe("digits_at"))
    assert recipe_hash(load_recipe("digits_at", {key: None})) == plain
    assert recipe_hash(load_recipe("digits_at", {key: 8})) != plain
    assert key.split(".")[1] not in load_recipe("digits_at").training_keys()["train"]
