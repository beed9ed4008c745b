"""Finding, merging and overriding recipes, and the hash that says whether two are the same training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatrock.core.errors import ConfigError
from flatrock.recipes import load as module
from flatrock.recipes.build import build_threat
from flatrock.recipes.check import validate
from flatrock.recipes.load import library, load_recipe, load_seeds, recipe_names
from flatrock.recipes.overlay import NAMING, overlay
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.schema import Data
from flatrock.recipes.text import recipe_text


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def test_fractions_are_numbers_wherever_a_number_is_expected() -> None:
    recipe = load_recipe(
        "digits_at",
        ["threat.eps=8/255", "attack.step_size=2/255", "optimizer.weight_decay=1/2000", "objective.name=at"],
    )
    assert recipe.threat.eps == 8 / 255
    assert recipe.attack.options["step_size"] == 2 / 255
    assert recipe.optimizer.weight_decay == 1 / 2000
    assert build_threat(recipe).eps == 8 / 255


def test_fractions_and_powers_in_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path, "mine", "base: digits_at\nthreat: {eps: 1/10}\nattack: {step_size: 1/40}\noptimizer: {lr: 5e-2}\n"
    )
    recipe = load_recipe(path)
    assert (recipe.name, recipe.threat.eps, recipe.optimizer.lr) == ("mine", 0.1, 0.05)
    assert recipe.attack.options == {"steps": 7, "step_size": 1 / 40}


def test_overrides_reach_nested_keys_lists_and_mappings() -> None:
    recipe = load_recipe(
        "digits_at",
        [
            "data.augment.crop=1",
            "train.keep.windows=[[2, 3], [5, 8]]",
            "evaluate.attacks=[fgsm, 'pgd-5:step_size=1/20']",
            "select.attack={name: pgd, steps: 3}",
            "train.tensorboard=false",
            "train.keep.every=null",
            "about.summary = mine = own",
        ],
    )
    assert recipe.data.augment.crop == 1
    assert recipe.train.keep.windows == ((2, 3), (5, 8))
    assert recipe.evaluate.attacks == ("fgsm", "pgd-5:step_size=1/20")
    assert recipe.select.attack == {"name": "pgd", "steps": 3}
    assert (recipe.train.tensorboard, recipe.train.keep.every) == (False, None)
    assert recipe.about.summary == "mine = own"


def test_double_underscores_are_dots_for_callers_with_keywords() -> None:
    by_keyword = load_recipe("digits_at", {"train__epochs": 3, "data__augment__crop": 1, "seed": 5})
    dotted = load_recipe("digits_at", ["train.epochs=3", "data.augment.crop=1", "seed=5"])
    assert by_keyword == dotted
    assert (dotted.train.epochs, dotted.data.augment.crop, dotted.seed) == (3, 1, 5)


def test_later_overrides_win_and_a_mapping_is_merged() -> None:
    recipe = load_recipe("digits_at", ["train={epochs: 3, batch_size: 32}", "train.epochs=4"])
    assert (recipe.train.epochs, recipe.train.batch_size) == (4, 32)
    assert load_recipe("digits_at", ["train={epochs: 3}"]).train.batch_size == 64


def test_select_has_a_short_form(tmp_path: Path) -> None:
    assert load_recipe("cifar10_at_linf", ["select=test"]).select.data == "test"
    recipe = load_recipe(write(tmp_path, "mine", "base: cifar10_at_linf\nselect: test\n"))
    assert (recipe.select.data, recipe.select.attack) == ("test", {"name": "pgd", "steps": 10})


@pytest.mark.parametrize("text", ["train.epochs", "=3", "  =3"])
def test_an_override_needs_a_key_and_a_value(text: str) -> None:
    with pytest.raises(ConfigError, match="an override is written key=value"):
        load_recipe("digits_at", [text])


def test_every_fault_of_overrides_is_told_at_once() -> None:
    wrong = ["train.epoch=3", "treat.eps=8/255", "foo", "attack.steps=x", "a=[1", "flatness.awp.gamma=1"]
    with pytest.raises(ConfigError) as error:
        load_recipe("digits_at", wrong)
    told = ("train.epoch:", "'treat'", "got 'foo'", "got 'x'", "override 'a=[1'", "flatness has no 'awp'")
    assert len(error.value.faults) == len(wrong)
    assert all(any(text in fault for fault in error.value.faults) for text in told)
    with pytest.raises(ConfigError) as error:
        load_seeds("digits_at", ["train.epoch=3", "foo"], [0, 1])
    assert len(error.value.faults) == 2


def test_a_tab_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="YAML allows no tabs there: use spaces"):
        load_recipe(write(tmp_path, "mine", "base: digits_at\ntrain:\n\tepochs: 3\n"))


@pytest.mark.parametrize("turn", [1, -1])
def test_options_may_come_before_their_section(turn: int) -> None:
    """Also where it is given whole; a list of methods, too."""
    attack = load_recipe("digits_trades", ["attack.steps=3", "attack={name: apgd-ce}"][::turn]).attack
    assert (attack.name, attack.options) == ("apgd-ce", {"steps": 3})
    pairs = {"model__depth": 16, "model": {"name": "wide_resnet", "width": 4}}
    model = load_recipe("cifar10_short_at", dict(list(pairs.items())[::turn])).model
    assert {key: model.options[key] for key in ("depth", "width")} == {"depth": 16, "width": 4}
    (awp,) = load_recipe("digits_trades", ["flatness.awp.gamma=0.02", "flatness=[awp]"][::turn]).flatness
    assert awp.options == {"gamma": 0.02}


def test_of_a_key_given_twice_the_last_counts() -> None:
    for last, pairs in ((5, {"train": {"epochs": 3}, "train.epochs": 5}), (3, {"train.epochs": 5, "train__epochs": 3})):
        assert load_recipe("digits_at", pairs).train.epochs == last
    given = {"train.epochs": 5, "train": {"epochs": 3}}
    assert load_recipe("digits_at", given).train.epochs == 3
    assert given == {"train.epochs": 5, "train": {"epochs": 3}}, "what is given stays as it is"
    for second in ("attack={name: apgd-ce}", "attack.name=apgd-ce"):
        attack = load_recipe("digits_at", ["attack={name: pgd, steps: 1, step_size: 0.1}", second]).attack
        assert (attack.name, attack.options) == ("apgd-ce", {}), "named last, without options of the one named first"


def test_an_override_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs is a value, not a section"):
        load_recipe("digits_at", ["train.epochs.more=3"])


def test_what_a_recipe_says_about_itself_is_not_said_of_one_built_on_it(tmp_path: Path) -> None:
    write(tmp_path, "mine", "base: cifar10_at_linf\nabout: {summary: mine}\n")
    about = load_recipe(tmp_path / "mine.yaml").about
    assert (about.summary, about.source, about.expect, about.time) == ("mine", "", "", "")
    assert load_recipe(write(tmp_path, "yours", "base: mine\n")).about.summary == ""
    assert load_recipe("cifar10_short_at").about.source, "the library's bases speak for its recipes"
    near = os.path.relpath(library()["cifar10_short_at"])
    assert load_recipe(near).about == load_recipe("cifar10_short_at").about


def test_base_sections_merge_key_by_key(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "mine", "base: cifar10_at_linf\ndata: {augment: {cutout: 8}}\n"))
    assert recipe.data.name == "cifar10"
    assert recipe.data.augment.model_dump(exclude_defaults=True) == {
        "crop": 4,
        "crop_fill": "reflect",
        "flip": True,
        "cutout": 8,
    }


def test_other_data_keep_what_is_said_of_any_and_drop_the_options_of_those_below(tmp_path: Path) -> None:
    assert load_recipe("moons_at").data.options
    mine = load_recipe(write(tmp_path, "mine", "base: moons_at\ndata: {name: npz}\nmodel: {num_classes: 2}\n"))
    assert (mine.data.name, mine.data.options) == ("npz", {})
    assert mine.data.held_out == load_recipe("moons_at").data.held_out != Data(name="npz").held_out
    again = load_recipe("moons_at", ["data.name=moons", "data.noise=0.05"])
    assert again.data.options == {**load_recipe("moons_at").data.options, "noise": 0.05}


# What is said below, and what stays of it where something else is named: what is said of any such thing.
BELOW = {
    "data": ({"name": "moons", "points": 90, "noise": 0.1, "held_out": 7}, {"held_out": 7}),
    "model": (
        {
            "name": "wide_resnet",
            "depth": 16,
            "bn_momentum": 0.01,
            "normalize": "cifar10",
            "num_classes": 3,
            "weights": "a",
        },
        {"normalize": "cifar10", "num_classes": 3, "weights": "a"},
    ),
    "objective": ({"name": "trades", "beta": 6, "label_smoothing": 0.1}, {}),
    "attack": ({"name": "pgd", "steps": 10, "bn_mode": "train"}, {}),
    "optimizer": ({"name": "entropy_sgd", "inner": 5, "lr": 0.2, "l2": 0.1}, {"lr": 0.2, "l2": 0.1}),
    "schedule": ({"name": "piecewise", "milestones": [1, 2]}, {}),
}


@pytest.mark.parametrize("section", BELOW)
def test_naming_something_else_drops_the_options_of_what_was_named(section: str) -> None:
    below, stays = BELOW[section]
    assert overlay({section: below}, {section: {"name": "another", "new": 1}}) == {
        section: {**stays, "name": "another", "new": 1}
    }
    for same in ({"new": 1}, {"name": below["name"], "new": 1}):
        assert overlay({section: below}, {section: same}) == {section: {**below, "new": 1}}


def test_every_section_that_names_something_is_treated_so() -> None:
    assert {*NAMING} == {*BELOW}


def test_a_name_that_says_the_default_names_nothing_else_but_auto() -> None:
    """`auto` is what fits the objective, which may be another attack than the one whose options are there."""
    below = {"optimizer": {"lr": 0.2}, "attack": {"steps": 3, "bn_mode": "train"}}
    named = {"optimizer": {"name": "sgd"}, "attack": {"name": "auto"}}
    assert overlay(below, named) == {"optimizer": {"lr": 0.2, "name": "sgd"}, "attack": {"name": "auto"}}


def test_another_network_has_none_of_the_options_of_its_base(tmp_path: Path) -> None:
    write(
        tmp_path, "wide", "base: cifar10_at_linf\nmodel: {name: wide_resnet, depth: 16, width: 2, bn_momentum: 0.01}\n"
    )
    vit = write(tmp_path, "mine", "base: wide\nmodel: {name: vit, width: 32, heads: 2, patch: 8}\n")
    with pytest.raises(ConfigError, match="model 'vit' needs the option 'depth'"):
        load_recipe(vit)  # and does not take that of another kind of network
    known = load_recipe(vit, ["model.depth=1"]).model
    assert {"width": 32, "heads": 2, "patch": 8, "depth": 1}.items() <= known.options.items()
    assert "bn_momentum" not in known.options
    assert known.normalize == load_recipe("cifar10_at_linf").model.normalize == "cifar10"
    assert load_recipe(tmp_path / "wide.yaml", ["model.name=resnet18"]).model.options == {}
    deeper = load_recipe(tmp_path / "wide.yaml", ["model.name=wide_resnet", "model.depth=22"])
    assert deeper.model.options == {"depth": 22, "width": 2, "bn_momentum": 0.01}


def test_another_norm_has_neither_radius_nor_step_of_the_one_before(tmp_path: Path) -> None:
    """0.2 of every pixel is not 0.2 of an image's length; what is given with the norm stays, in whatever order."""
    own = write(tmp_path, "own", "base: digits_at\nthreat: {norm: l2}\n")
    for source, overrides in (("digits_at", ["threat.norm=l2"]), (own, [])):
        with pytest.raises(ConfigError, match=r"1 fault:\n  - threat.eps: this key is required; a radius is of one"):
            load_recipe(source, overrides)
    given = {"steps": 7, "step_size": 0.05}
    assert load_recipe("digits_at").attack.options == given
    for order in (["threat.norm=l2", "threat.eps=1"], ["threat.eps=1", "threat.norm=l2"]):
        recipe = load_recipe("digits_at", order)
        assert (recipe.threat.norm, recipe.threat.eps, recipe.attack.options) == ("l2", 1.0, {"steps": 7})
    step = ["attack.step_size=0.2", "threat.norm=l2", "threat.eps=1"]
    assert load_recipe("digits_at", step).attack.options == {"steps": 7, "step_size": 0.2}
    assert load_recipe("digits_at", ["threat.norm=linf"]).attack.options == given, "the same norm again"
    assert load_recipe("digits_at", ["threat.eps=0.1"]).attack.options == given


def test_options_given_before_their_name_are_kept() -> None:
    for order in (["objective.beta=3", "objective.name=trades"], ["objective.name=trades", "objective.beta=3"]):
        assert load_recipe("digits_at", order).objective.options == {"beta": 3}
    recipe = load_recipe("digits_at", {"objective__beta": 3, "objective__name": "trades"})
    assert recipe.objective.options == {"beta": 3}


def test_a_renamed_section_replaces_the_one_below() -> None:
    below = {"schedule": {"name": "piecewise", "milestones": [1, 2]}, "seed": 1}
    assert overlay(below, {"schedule": {"name": "cosine"}}) == {"schedule": {"name": "cosine"}, "seed": 1}
    assert overlay(below, {"schedule": {"name": "piecewise", "factor": 0.5}})["schedule"] == {
        "name": "piecewise",
        "milestones": [1, 2],
        "factor": 0.5,
    }
    assert below["schedule"] == {"name": "piecewise", "milestones": [1, 2]}, "the base itself is not changed"
    fast = load_recipe("cifar10_at_fast")
    assert (fast.schedule.name, fast.schedule.options) == ("one_cycle", {})


def test_a_base_beside_the_file_comes_before_the_library(tmp_path: Path) -> None:
    write(tmp_path, "digits_at", "base: digits_trades\nseed: 7\n")
    recipe = load_recipe(write(tmp_path, "mine", "base: digits_at\n"))
    assert (recipe.seed, recipe.objective.name) == (7, "trades")


def test_a_recipe_has_its_own_name_or_that_of_its_file(tmp_path: Path) -> None:
    write(tmp_path, "mine", recipe_text(load_recipe("digits_at", ["name=mine"])))
    write(tmp_path, "child", "base: mine\n")
    assert load_recipe(write(tmp_path, "grandchild", "base: child\nseed: 1\n")).name == "grandchild"
    assert load_recipe(tmp_path / "child.yaml").name == "child"
    assert load_recipe(tmp_path / "child.yaml", ["name=other"]).name == "other"
    assert load_recipe(write(tmp_path, "named", "base: mine\nname: a name\n")).name == "a name"
    assert load_recipe(tmp_path / "mine.yaml").name == "mine"


def test_recipes_of_the_library_are_called_what_they_are_found_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [name for name in recipe_names() if load_recipe(name).name != name] == []
    write(tmp_path, "table", "name: table\nbase: digits_at\nrows: {row_a: {seed: 1}, row_b: {seed: 2}}\n")
    monkeypatch.setattr(module, "TABLES", tmp_path)
    monkeypatch.setattr(module, "library", lambda: {**library(), "row_b": tmp_path / "table.yaml"})
    assert (load_recipe("row_b").name, load_recipe("row_b").seed) == ("row_b", 2)


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("base: digits_at\ntrain: {epochs: 1}\nseed: 1\ntrain: {batch_size: 32}\n", "train", 4),
        ("base: digits_at\ntrain:\n  epochs: 1\n  batch_size: 32\n  'epochs': 2\n", "epochs", 5),
        ("base: digits_at\nflatness:\n- {name: awp}\n- {name: rat, eta: 1, eta: 2}\n", "eta", 4),
    ],
)
def test_a_key_that_is_there_twice_is_refused(text: str, key: str, line: int, tmp_path: Path) -> None:
    path = write(tmp_path, "twice", text)
    with pytest.raises(ConfigError, match=rf"the key '{key}' is there twice(.|\n)*line {line}, column") as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="the key 'epochs' is there twice"):
        load_recipe("digits_at", ["train={epochs: 1, epochs: 2}"])


def test_merge_keys_give_way_to_keys_that_are_there(tmp_path: Path) -> None:
    """Also where the mapping that is merged has merged another itself, before its own turn comes."""
    text = """
    base: digits_at
    train: {keep: &a {every: 1, after: 2}, epochs: 3}
    select: {attack: {name: &name pgd, steps: 3}}
    evaluate: {attacks: [&b {name: *name, steps: 1}, &c {<<: *b, steps: 2, label: c}, {<<: [*c, *b], label: d}]}
    """
    recipe = load_recipe(write(tmp_path, "merged", text))
    assert recipe.train.keep.after == 2
    attacks = [{"steps": 1}, {"steps": 2, "label": "c"}, {"steps": 2, "label": "d"}]
    assert recipe.evaluate.attacks == tuple({"name": "pgd", **a} for a in attacks)


def test_base_cycles_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a", "base: b\n")
    write(tmp_path, "b", "base: c\n")
    write(tmp_path, "c", "base: a\n")
    with pytest.raises(ConfigError, match="is its own base: a -> b -> c -> a"):
        load_recipe(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="is its own base: me -> me"):
        load_recipe(write(tmp_path, "me", "base: me\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not readable YAML"),
        ("- a\n- b\n", "must be a mapping of sections, got list"),
        ("", "must be a mapping of sections, got NoneType"),
        ("seed: 2026-99-99", "is not readable YAML"),
        ("base: no_such_recipe\n", "unknown recipe 'no_such_recipe'"),
    ],
)
def test_unreadable_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(write(tmp_path, "odd", text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no recipe file .*gone\.yaml"):
        load_recipe(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    "override",
    ["about.summary=other", "name=other", "evaluate.attacks=[fgsm]", "train.save_seconds=1", "train.tensorboard=false"],
)
def test_keys_that_do_not_decide_the_weights_leave_the_hash_alone(override: str) -> None:
    assert recipe_hash(load_recipe("digits_at", [override])) == recipe_hash(load_recipe("digits_at"))


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "threat.eps=0.1",
        "attack.steps=9",
        "attack.bn_mode=train",
        "optimizer.lr=0.01",
        "data.held_out=100",
        "data.augment.crop=1",
        "train.epochs=29",
        "schedule.peak=0.4",
        "objective.name=alp",
        "select.data=test",
    ],
)
def test_keys_that_decide_the_weights_change_the_hash(override: str) -> None:
    assert recipe_hash(load_recipe("digits_at", [override])) != recipe_hash(load_recipe("digits_at"))


def test_hashes_of_the_library_are_distinct() -> None:
    hashes = {name: recipe_hash(load_recipe(name)) for name in recipe_names()}
    assert len(set(hashes.values())) == len(hashes)


@pytest.mark.parametrize("name", recipe_names())
def test_the_resolved_recipe_survives_yaml(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    stored = yaml.safe_load(yaml.safe_dump(recipe.resolved(), sort_keys=False))
    again = validate(stored, "stored")
    assert again == recipe
    assert recipe_hash(again) == recipe_hash(recipe)
    copied = load_recipe(write(tmp_path, "copy", recipe_text(recipe)))
    assert recipe_hash(copied) == recipe_hash(recipe)


def test_a_fraction_hashes_the_same_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    in_file = load_recipe(write(tmp_path, "mine", "base: digits_at\nattack: {step_size: 1/255}\n"))
    typed = load_recipe("digits_at", ["attack.step_size=1/255"])
    assert recipe_hash(in_file) == recipe_hash(typed)
    assert in_file.resolved()["attack"]["step_size"] == 1 / 255


def test_a_recipe_is_named_not_passed() -> None:
    with pytest.raises(ConfigError, match="named by text or a path, got dict"):
        load_recipe({"data": {"name": "digits"}})  # type: ignore[arg-type]


# What overrides change is said beside the summary


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["threat.eps=4/255", "train.epochs=3"], "threat.eps 4/255, train.epochs 3"),
        ({"train": {"epochs": 3}, "threat__eps": 4 / 255}, "threat.eps 4/255, train.epochs 3"),
        (
            ["train.epochs=3", "seed=4", "name=mine", "evaluate.attacks=[fgsm]", "train.tensorboard=false"],
            "train.epochs 3",
        ),
        (["train.epochs=3", "train.epochs=4"], "train.epochs 4"),
        (["threat.eps=0.25", "model.weights=somewhere"], "model.weights given, threat.eps 0.25"),
        (["objective.name=at"], "objective.name at, no objective.beta"),
        (["flatness=awp", "data.limit=512"], "data.limit 512, flatness [awp]"),
    ],
)
def test_a_summary_names_what_was_changed(overrides: Any, told: str) -> None:
    given, changed = load_recipe("digits_trades"), load_recipe("digits_trades", overrides)
    assert changed.about.summary == f"{given.about.summary} (changed: {told})"
    assert f"# {changed.about.summary}\n" in recipe_text(changed)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["seed=3"],
        ["train.epochs=3", "train.epochs=20"],  # as it was
        ["threat.eps=1/5"],  # as it is
        ["name=mine", "evaluate.attacks=[fgsm]", "engine.compile=false"],
    ],
)
def test_a_summary_of_the_same_training_stays(overrides: list[str]) -> None:
    given = load_recipe("digits_trades")
    assert load_recipe("digits_trades", overrides).about.summary == given.about.summary
    assert recipe_hash(load_recipe("digits_trades", overrides)) == recipe_hash(given) or "seed=3" in overrides


def test_a_summary_of_ones_own_is_taken() -> None:
    assert load_recipe("digits_trades", ["about.summary=mine", "train.epochs=3"]).about.summary == "mine"
