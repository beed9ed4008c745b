"""What is wrong with a recipe is found before any work, all of it at once, with the nearest right word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatrock.core.errors import ConfigError
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash


def faults(source: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(source, overrides)
    return caught.value.faults


def only_fault(source: str, *overrides: str) -> str:
    found = faults(source, *overrides)
    assert len(found) == 1, found
    return found[0]


def test_six_different_faults_are_reported_together() -> None:
    found = faults(
        "digits_at",
        "trian={epochs: 3}",
        "optimizer.lr=fast",
        "threat.eps=8",
        "objective.name=trads",
        "model.num_classes=7",
        "evaluate.attacks=[pgd-20, pdg-20]",
    )
    assert len(found) == 6
    beginnings = (
        "unknown recipe section 'trian'",
        "optimizer.lr: expected a number or a fraction such as 8/255, got 'fast'",
        "threat: Linf eps must lie in [0, 1], got 8.0",
        "objective: unknown objective 'trads'",
        "model.num_classes: got 7",
        "evaluate.attacks: 'pdg-20': unknown attack or plan 'pdg'",
    )
    for beginning in beginnings:
        assert sum(f.startswith(beginning) for f in found) == 1, beginning


def test_a_part_with_several_faults_tells_all_of_them() -> None:
    """Names that are missing, and one that is misspelt beside them."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(
            "digits_gat",
            {"model": {"name": "vit", "depht": 1, "width": 8}, "objective": {"name": "gat", "a": 1, "b": 2}},
        )
    told = caught.value.faults
    assert sum("'depht'" in fault for fault in told) == 1
    for option in ("depth", "heads", "patch"):
        assert f"model: model 'vit' needs the option '{option}'" in told
    assert [sum(f"'{option}'" in fault for fault in told) for option in "ab"] == [1, 1]
    assert len(told) == 6


def test_the_error_counts_and_lists_the_faults() -> None:
    with pytest.raises(ConfigError, match=r"recipe digits_at has 2 faults:\n  - .*\n  - ") as caught:
        load_recipe("digits_at", ["threat.eps=-1", "seed=-1"])
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("objetive={name: at}", "did you mean 'objective'?"),
        ("train.epoch=3", "did you mean 'epochs'?"),
        ("data.augment.corp=4", "did you mean 'crop'?"),
        ("train.keep.evry=4", "did you mean 'every'?"),
        ("data.extra={file: a.npz, fration: 0.5}", "did you mean 'fraction'?"),
        ("objective.name=tradse", "did you mean 'trades'?"),
        ("model.name=digit_cnn", "did you mean 'digits_cnn'?"),
        ("data.name=digit", "did you mean 'digits'?"),
        ("schedule.name=onecycle", "did you mean 'one_cycle'?"),
        ("attack.step_sise=0.1", "did you mean 'step_size'?"),
        ("objective.betta=6", "did you mean 'beta'?"),
        ("schedule.peek=0.3", "did you mean 'peak'?"),
        ("model.normalize=cifar", "did you mean 'cifar10'?"),
        ("select.attack=pgd-10:restart=3", "did you mean 'restarts'?"),
        ("attack.start=gausian", "did you mean 'gaussian'?"),
        ("epochs=3", "did you mean train.epochs?"),
    ],
)
def test_near_misses_get_a_hint(override: str, hint: str) -> None:
    assert hint in only_fault("digits_trades", override)


def test_unknown_recipe_gets_a_hint_and_bases_are_not_offered() -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'digits_tades'.*did you mean 'digits_trades'\?") as caught:
        load_recipe("digits_tades")
    assert "_digits" not in str(caught.value).replace(" ", ",").split(",")


@pytest.mark.parametrize(
    ("source", "override", "message"),
    [
        ("digits_at", "threat.eps=1.5", r"threat: Linf eps must lie in [0, 1], got 1.5"),
        ("digits_at", "threat.eps=-0.1", r"threat: Linf eps must lie in [0, 1], got -0.1"),
        ("digits_at_l2", "threat.eps=-0.1", r"threat: L2 eps must lie in [0, 388], got -0.1"),
        ("digits_at", "threat.norm=l3", "threat.norm: got 'l3'"),
        ("digits_at", "attack.step_size=2", "step_size must lie in (0, 1]"),
        ("digits_at", "attack.steps=-1", "attack: steps must be a whole number >= 0, got -1"),
        ("digits_trades", "attack.start=zero", "attack: loss 'kl' has zero gradient at the clean input"),
        ("digits_trades", "objective.beta=-1", "objective: trades beta must be a number >= 0, got -1"),
        ("digits_at", "train.epochs=0", "train.epochs: got 0"),
        ("digits_at", "train.epochs=2.5", "train.epochs: got 2.5"),
        ("digits_at", "train.batch_size=1", "train.batch_size: got 1"),
        ("digits_at", "seed=true", "seed: got True"),
        ("digits_at", "optimizer.momentum=1", "optimizer.momentum: got 1"),
        ("digits_at", "data.held_out=0", "data.held_out: got 0"),
        (
            "digits_at",
            "data.extra={file: x.npz, fraction: 0.001}",
            "data.extra: extra_fraction=0.001 of batch_size=64 is 0",
        ),
        ("digits_at", "data.extra={file: x.npz, fraction: 0.999}", "choose a fraction that leaves 1..63"),
        ("digits_at", "optimizer.name=adam", "optimizer.name: unknown optimizer 'adam'; known: adamw, entropy"),
        ("digits_at", "optimizer={momentum: 0, nesterov: true}", "nesterov needs momentum > 0"),
        ("digits_at", "schedule={name: piecewise, milestones: [8, 5]}", "schedule: milestones must rise"),
        ("digits_at", "train=5", "train: got 5"),
        ("digits_at", "objective=at", "objective: got 'at'"),
        ("digits_at", "select.attack=3", "select.attack: got 3, but an attack is text such as 'pgd-20' or a mapping"),
        ("digits_at", "evaluate.attacks=[3]", "evaluate.attacks.0: got 3, but an attack is text such as 'pgd-20'"),
        (
            "digits_at",
            "evaluate.attacks=pgd-20",
            "evaluate.attacks: got 'pgd-20', but this is a list; write [pgd-20]",
        ),
        ("digits_at", "evaluate.attacks=null", "evaluate.attacks: got None, but this is a list"),
    ],
)
def test_bad_values_are_named_with_their_rule(source: str, override: str, message: str) -> None:
    assert message in only_fault(source, override)


@pytest.mark.parametrize("key", ["lr", "epochs"])
def test_rate_and_length_do_not_belong_to_the_schedule(key: str) -> None:
    assert only_fault("digits_at", f"schedule.{key}=3") == f"schedule: {key} belong to optimizer.lr and train.epochs"


def test_missing_sections_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text("data: {name: digits, held_out: 200}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    missing = ("model", "threat", "objective", "schedule", "train")
    assert caught.value.faults == tuple(f"{name}: this section is required" for name in missing)


@pytest.mark.parametrize("mixing", ["mixup", "cutmix"])
def test_mixing_needs_soft_labels_and_no_extra_data(mixing: str) -> None:
    asked = f"data.augment.{mixing}=1.4"
    assert only_fault("digits_mart", asked) == (
        f"data.augment.{mixing}: objective 'mart' needs hard labels; set {mixing} to 0"
    )
    assert getattr(load_recipe("digits_at", [asked]).data.augment, mixing) == 1.4
    assert "cannot be combined with data.extra" in only_fault("digits_at", asked, "data.extra.file=more.npz")


def test_a_batch_is_mixed_once_and_points_are_not_cut() -> None:
    both = only_fault("digits_at", "data.augment.mixup=1", "data.augment.cutmix=1")
    assert both == "data.augment: mixup and cutmix both mix a batch; set one of them to 0"
    assert "holds points, not images; only mixup applies" in only_fault("moons_at", "data.augment.cutmix=1")


def test_model_must_fit_the_data() -> None:
    assert "'preact_resnet18' takes (3, 32, 32), 'digits' has (1, 8, 8)" in only_fault(
        "digits_at", "model.name=preact_resnet18"
    )
    assert "got 100, but 'cifar10' has 10 classes" in only_fault("cifar10_at_linf", "model.num_classes=100")
    assert "takes 1 channel" in only_fault("digits_at", "model.normalize=cifar10")
    assert "holds points, not images" in only_fault("moons_at", "data.augment.flip=true")
    assert "32 lines less leave nothing of 32 pixels" in only_fault("cifar10_short_at", "data.augment.shift=32")
    assert load_recipe("cifar10_short_at", ["data.augment.shift=31"]).data.augment.shift == 31
    found = only_fault("digits_at", "data.name=folder")
    assert "model.num_classes: needed with data 'folder'" in found


def test_own_images_must_be_what_the_model_takes() -> None:
    """How large they are only the files know, but the model says how large they must be."""
    own = ("data.name=folder", "model.num_classes=3")
    grey = (*own, "data.channels=1")
    assert load_recipe("digits_at", grey).data.options == {"channels": 1}
    assert "data.channels: got 3, but 'digits_cnn' takes inputs (1, 8, 8)" in only_fault("digits_at", *own)
    assert "data: channels must be 1 (grey) or 3 (RGB), got 2" in only_fault("digits_at", *own, "data.channels=2")
    assert "a square of 9 does not fit 8 pixels" in only_fault("digits_at", *grey, "data.augment.cutout=9")


def test_own_images_that_are_made_one_size_decide_the_shape() -> None:
    own = ("data={name: folder, channels: 1, size: 8}", "model.num_classes=3")
    assert load_recipe("digits_at", own).data.options == {"channels": 1, "size": 8}
    assert "'digits_cnn' takes (1, 8, 8), 'folder' has (1, 9, 9)" in only_fault("digits_at", *own, "data.size=9")
    assert "data: an image's size must be a whole number >= 1, got 0" in only_fault("digits_at", *own, "data.size=0")
    assert "an image's resize must be a whole number >= 8, got 7" in only_fault("digits_at", *own, "data.resize=7")
    found = only_fault("digits_at", "data={name: folder, channels: 1, resize: 9}", "model.num_classes=3")
    assert "resize=9 is the length before a square is cut out; give its size, too" in found
    vit = "model={name: vit, depth: 1, width: 8, heads: 2, patch: 16, num_classes: 3, normalize: imagenet}"
    made = load_recipe("cifar10_at_linf", ["data={name: folder, size: 48}", vit])
    assert made.model.options["input_shape"] == [3, 48, 48]


@pytest.mark.parametrize("key", ["attack={name: $}", "select.attack=$", "evaluate.attacks=[$]"])
@pytest.mark.parametrize(
    ("overrides", "attack", "message"),
    [
        (("threat={norm: l2, eps: 0.5}",), "rays", "'rays' measures linf distances, got l2"),
        (("data={name: folder, channels: 1}", "model.num_classes=3"), "apgd-t", "needs at least 4 classes"),
        (("data={name: folder, channels: 1}", "model.num_classes=2"), "apgd-dlr", "needs at least 3 classes"),
    ],
)
def test_attacks_suit_the_threat_and_the_classes(
    overrides: tuple[str, ...], attack: str, message: str, key: str
) -> None:
    """Those of training and of its probes would end the run, those of evaluation come too late."""
    base = ("attack={name: pgd, steps: 1}", *overrides)
    load_recipe("digits_at", base)
    found = only_fault("digits_at", *base, key.replace("$", attack))
    assert found.startswith(key.partition("=")[0])
    assert message in found


def test_what_follows_from_other_keys_is_filled_in() -> None:
    at, trades, standard = (load_recipe(f"digits_{n}") for n in ("at", "trades", "standard"))
    assert (at.attack.name, trades.attack.name, standard.attack.name) == ("pgd", "kl-pgd", "none")
    assert (at.select.metric, standard.select.metric) == ("robust", "clean")
    assert at.model.num_classes == 10


EVIL = "__import__('os').mkdir('broken_in')"


@pytest.mark.parametrize(
    "key", ["about.summary", "threat.eps", "attack.steps", "objective.beta", "train.epochs", "name"]
)
def test_code_in_a_value_is_only_text(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if key in ("about.summary", "name"):
        load_recipe("digits_trades", {key: EVIL})
    else:
        assert EVIL in only_fault("digits_trades", f"{key}={EVIL}").replace('\\"', '"')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["file", "override"])
def test_yaml_tags_that_call_python_are_refused(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = "!!python/object/apply:os.mkdir [broken_in]"
    (tmp_path / "evil.yaml").write_text(f"base: digits_at\nseed: {evil}\n")
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        if where == "file":
            load_recipe(tmp_path / "evil.yaml")
        else:
            load_recipe("digits_at", [f"train={{epochs: {evil}}}"])
    assert [p.name for p in tmp_path.iterdir()] == ["evil.yaml"]


ODD: list[Any] = [None, True, -1, 1e308, float("nan"), "x", [], ["a"], {"a": 1}, {5: 1}]
KEYS = {
    "": ("name", "about", "seed", "bogus"),
    "data": ("name", "held_out", "limit", "augment", "augment.crop", "augment.mixup", "extra", "extra.file"),
    "model": ("name", "num_classes", "normalize"),
    "threat": ("norm", "eps"),
    "objective": ("name", "beta"),
    "attack": ("name", "bn_mode", "steps", "step_size", "noise", "start"),
    "optimizer": ("lr", "nesterov"),
    "schedule": ("name", "clock", "peak", "start_divisor"),
    "train": ("epochs", "keep", "keep.windows"),
    "select": ("data", "attack"),
    "evaluate": ("attacks", "batch_size"),
}
ODD_KEYS = [*filter(None, KEYS), *(f"{section}.{key}".strip(".") for section, keys in KEYS.items() for key in keys)]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_values_are_accepted_or_refused_but_never_crash(key: str) -> None:
    for value in ODD:
        try:
            recipe = load_recipe("digits_trades", {key: value})
        except ConfigError as error:
            assert key.split(".")[0] in str(error)
        else:
            assert len(recipe_hash(recipe)) == 16


def test_a_faulty_section_does_not_hide_faults_of_those_that_depend_on_it() -> None:
    found = faults("digits_at", "train.epoch=3", "schedule.lr=3", "objective.name=trads", "attack.stpes=3")
    assert len(found) == 4
    assert any(f.startswith("schedule: lr belong") for f in found)
    assert any("did you mean 'steps'?" in f for f in found)


@pytest.mark.parametrize(
    ("override", "hint"),
    [("data.heldout=9", "did you mean 'held_out'?"), ("attack.bnmode=train", "did you mean 'bn_mode'?")],
)
def test_a_sections_own_keys_are_among_the_hints(override: str, hint: str) -> None:
    assert hint in only_fault("digits_at", override)


@pytest.mark.parametrize("key", ["train.epochs", "attack.steps", "threat.eps", "schedule.peak"])
@pytest.mark.parametrize("value", ["1/0", "1e999"])
def test_impossible_numbers_are_faults_with_a_place(key: str, value: str) -> None:
    found = faults("digits_at", f"{key}={value}", "seed=-1")
    assert len(found) == 2
    assert any(f.startswith(key.split(".")[0]) and value in f for f in found)


def test_what_torch_refuses_is_told_in_one_line() -> None:
    fault = only_fault("digits_at", f"model.num_classes={2**70}")
    assert fault.startswith("model: ")
    assert "\n" not in fault


def test_a_word_in_place_of_a_section_is_explained() -> None:
    assert only_fault("digits_at", "objective=at") == (
        "objective: got 'at', but a section holds keys; write objective: {name: ...} or such"
    )
    assert only_fault("digits_at", "threat=null").endswith("write threat: {norm: ..., eps: ...} or such")
    assert only_fault("digits_at", "data.augment=3").endswith("write data.augment: {crop: ...} or such")


def test_a_value_is_told_once() -> None:
    assert only_fault("digits_at", "optimizer.lr=0.1x") == (
        "optimizer.lr: expected a number or a fraction such as 8/255, got '0.1x'"
    )


@pytest.mark.parametrize("name", ["../x", ".x", "a/b", "a\\b", ""])
def test_a_name_that_leads_elsewhere_is_explained(name: str) -> None:
    assert only_fault("digits_at", f"name={name}").startswith(
        f"name: got {name!r}, but it is the name of the run's folder"
    )


def test_a_milestone_may_be_far_away() -> None:
    recipe = load_recipe("digits_at", ["schedule.name=piecewise", f"schedule.milestones=[5, {10**400}]"])
    assert recipe.schedule.options["milestones"] == [5, 10**400]


@pytest.mark.parametrize("milestones", ["[a, 5]", "soon", "[true]", "5", "null", "[.nan]", "[.inf]"])
def test_milestones_are_numbers(milestones: str) -> None:
    assert "schedule: milestones must be numbers, got" in only_fault(
        "digits_at", "schedule.name=piecewise", f"schedule.milestones={milestones}"
    )
