"""The library as a whole: what is in it, that each file says what it is, and the constants of the papers."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import yaml
from recipe_table_cases import EXPECTED as TABLE_ROWS

from flatrock.attacks.catalog import ATTACKS, parse_attack
from flatrock.core.bands import bands_text
from flatrock.data.moons import SCALE
from flatrock.engine.job import Keep
from flatrock.flatness.catalog import FLATNESS
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.recipes.build import build_threat
from flatrock.recipes.load import LIBRARY, TABLES, library, load_recipe, recipe_names, summaries
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.schema import Recipe

DATA, METHODS, NORMS = ("cifar10", "cifar100", "svhn"), ("at", "trades", "mart", "alp"), ("linf", "l2")
GRID = [f"{d}_{m}_{n}" for d, m, n in product(DATA, METHODS, NORMS)]
REGULARISED = [f"cifar10_at_{n}_{r}" for n, r in product(NORMS, ("l1", "l2", "cutout", "mixup"))]
PLAIN_DIGITS = ("standard", "at", "trades", "hat", "gat", "mart", "alp", "at_l2", "trades_l2")
FLAT_DIGITS = ("trades_awp", "trades_rat", "trades_trh", "trades_s2o", "trades_swa", "trades_awp_rat_swa", "at_awp")
SMOOTH = ("smooth", "trades_smooth")
DIGITS = [f"digits_{m}" for m in (*PLAIN_DIGITS, *FLAT_DIGITS, "at_sam", "atent", "entropy_sgd", "finetune", *SMOOTH)]
MNIST = ["mnist_at_linf", "mnist_trades_linf", "fashion_mnist_at_linf"]
FLAT_MNIST = ["mnist_atent_linf", "mnist_atent_l2", "mnist_sgd", "mnist_entropy_sgd"]
NETWORKS = ["cifar10_at_linf_wrn34", *(f"cifar10_trades_linf_{n}" for n in ("wrn34", "vgg16", "mobilenetv2"))]
TRH = [f"cifar10_{m}_trh{network}" for m in ("at", "trades") for network in ("", "_vit_b")]
IMAGENET = [f"imagenet_{m}_trh_vit_b{norm}" for m in ("at", "trades") for norm in ("", "_l2")]
SEARCHED = ["cifar10_trades_smooth_pgd", "digits_trades_smooth_pgd", "cifar10_atent_l2_smooth"]
OURS = ["cifar10_at_fast", *TRH, *IMAGENET, *(f"cifar10_{m}" for m in SMOOTH), *SEARCHED]
SHORT_AT = [f"at{m}" for m in ("", "_awp", "_trh", "_swa", "_rat")]
SHORT_TRADES = [f"trades{m}" for m in ("", "_awp", "_rat1", "_rat2", "_awp_rat", "_trh", "_s2o", "_swa")]
SHORT_OTHERS = ["hat", "hat_awp", "gat", "mart", "mart_awp", "alp", "atent"]
SHORT = [f"cifar10_short_{m}" for m in ("standard", *SHORT_AT, *SHORT_TRADES, *SHORT_OTHERS)]
PROTOCOLS = [*SHORT, "cifar10_full_at", "cifar10_full_at_awp", "cifar10_flagship"]
FINETUNED = ["cifar10_standard_wrn34", "cifar10_atent_finetune_wrn34"]
HELPED = ["cifar10_gat_linf", "cifar10_trades_gat_linf", "cifar10_hat_linf", "cifar10_standard"]
EXTRA = [f"cifar10_{m}_wrn28" for m in ("standard", "rst_linf", "rst_smooth", "trades_ddpm_linf")]
EXTRA += ["cifar10_hat_ddpm_linf"]
OTHERS = [
    *DIGITS,
    *FINETUNED,
    *HELPED,
    *EXTRA,
    "moons_at",
    "moons_standard",
    *MNIST,
    *FLAT_MNIST,
    *NETWORKS,
    *OURS,
    *PROTOCOLS,
]
IN_TABLES = [row for rows in TABLE_ROWS.values() for row in rows]
EXPECTED = sorted(GRID + OTHERS + IN_TABLES)
MEASURED = [*DIGITS, "moons_at", "moons_standard", *TABLE_ROWS["trh_moons"]]
MEASURED += ["cifar10_at_fast", "cifar10_flagship", "cifar10_full_at", "cifar10_full_at_awp"]
BASES = ["_at", "_atent", "_cifar10_ddpm", "_cifar10_short", "_digits", "_mart", "_paper", "_rat", "_trades"]


@cache
def loaded(name: str) -> Recipe:
    """The recipe as it stands (it is frozen, so one copy serves every test)."""
    return load_recipe(name)


def comments(name: str) -> list[str]:
    """The lines of the comment a file opens with."""
    lines = library()[name].read_text().splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]


def step_size(recipe: Recipe, attack: Any) -> float:
    """The step an attack takes under the recipe's threat."""
    return build_threat(recipe).default_step if attack.step_size is None else attack.step_size


def inner(recipe: Recipe) -> Any:
    """The attack the recipe trains with."""
    return ATTACKS.make(recipe.attack.name, **recipe.attack.options)


def test_the_library_holds_exactly_these_recipes() -> None:
    assert len(EXPECTED) == len(set(EXPECTED)) == 252
    assert set(REGULARISED) < set(IN_TABLES)
    assert sorted(recipe_names()) == EXPECTED
    assert sorted(n for n in library() if n.startswith("_")) == BASES


def test_no_two_files_share_a_name() -> None:
    files = [p.stem for p in LIBRARY.rglob("*.y*ml") if p.parent != TABLES]
    rows = [row for p in TABLES.iterdir() for row in yaml.safe_load(p.read_text())["rows"]]
    assert sorted(files + rows) == sorted(library())


@pytest.mark.parametrize("name", EXPECTED)
def test_recipe_is_valid_and_says_what_it_is(name: str) -> None:
    recipe = loaded(name)
    assert recipe.name == name
    for key, text in recipe.about.model_dump(exclude={"bands"}).items():
        assert text.strip(), f"{name}: about.{key} is empty"
        assert "TBD" not in text
    own = yaml.safe_load(library()[name].read_text())
    own = own["rows"][name] if name in IN_TABLES else own
    assert {"summary", "expect"} <= own["about"].keys(), "a base's claim is not this recipe's"


@pytest.mark.parametrize("name", [n for n in EXPECTED if n not in IN_TABLES])
def test_a_file_opens_with_what_it_is_and_its_command(name: str) -> None:
    assert f"#   flatrock train {name}" in comments(name)
    assert 2 <= len(comments(name)) <= 6
    assert len(library()[name].read_text().splitlines()) <= 25


@pytest.mark.parametrize("name", BASES)
def test_bases_are_described(name: str) -> None:
    assert len(comments(name)) >= 2


def test_summaries_are_distinct() -> None:
    summaries = [loaded(n).about.summary for n in EXPECTED]
    assert len(set(summaries)) == len(summaries)


def test_summaries_are_those_of_the_recipes() -> None:
    abouts = {name: loaded(name).about for name in recipe_names()}
    assert summaries() == {
        name: about.summary + (f"; expect {bands_text(about.bands)}" if about.bands else "")
        for name, about in abouts.items()
    }
    assert all(summaries().values())


def test_what_is_changed_in_a_recipe_stays_there() -> None:
    """Files of the library are read once for all that are built on them."""
    before = recipe_hash(load_recipe("cifar10_full_at_awp"))
    load_recipe("cifar10_full_at", {"attack.steps": 3, "train.keep": {"every": 7}, "flatness": "awp"})
    load_recipe("cifar10_full_at_awp", {"flatness.awp.gamma": 0.5})
    assert recipe_hash(load_recipe("cifar10_full_at_awp")) == before


@pytest.mark.parametrize("name", [n for n in EXPECTED if n not in MEASURED])
def test_unmeasured_recipes_claim_no_time_of_ours(name: str) -> None:
    assert "not timed here" in loaded(name).about.time


@pytest.mark.parametrize("name", GRID + REGULARISED)
def test_threat_and_steps_are_the_papers(name: str) -> None:
    recipe = loaded(name)
    data, method, norm = name.split("_")[:3]
    eps = {"l2": 128 / 255, "linf": 0.031 if method == "mart" else 8 / 255}[norm]
    step = {"l2": 15 / 255, "linf": 0.007 if method == "mart" else 2 / 255}[norm]
    if (data, norm) == ("svhn", "linf") and method in ("at", "alp"):
        step = 1 / 255
    assert (recipe.threat.norm, recipe.threat.eps) == (norm, eps)
    assert inner(recipe).steps == 10
    assert step_size(recipe, inner(recipe)) == pytest.approx(step, rel=1e-15)
    assert inner(recipe).start == ("uniform" if method in ("at", "alp") else "gaussian")
    assert recipe.attack.name == ("kl-pgd" if method == "trades" else "pgd")
    _, probe = parse_attack(recipe.select.attack)
    assert probe.steps == 10
    assert (recipe.data.held_out, recipe.select.data, recipe.select.metric) == (1000, "held_out", "robust")


@pytest.mark.parametrize("name", GRID + REGULARISED)
def test_test_attack_is_the_papers(name: str) -> None:
    recipe = loaded(name)
    data, method, norm = name.split("_")[:3]
    label, attack = parse_attack(recipe.evaluate.attacks[0])
    assert label.startswith("pgd-20")
    assert attack.steps == 20
    published = {"at": 1 / 255 if data == "svhn" else 2 / 255, "trades": 0.003, "mart": 0.003}
    expected = 15 / 255 if norm == "l2" else published["at" if method == "alp" else method]
    assert step_size(recipe, attack) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("name", GRID)
def test_optimisation_is_the_papers(name: str) -> None:
    recipe = loaded(name)
    data, method, _ = name.split("_")
    mart, svhn, rice = method == "mart", data == "svhn", method in ("at", "alp")
    assert recipe.optimizer.lr == (0.01 if mart or svhn else 0.1)
    assert (recipe.optimizer.weight_decay, recipe.optimizer.decay_on) == (3.5e-3 if mart else 5e-4, "all")
    assert (recipe.optimizer.momentum, recipe.optimizer.nesterov) == (0.9, False)
    assert (recipe.train.epochs, recipe.train.batch_size) == (120 if mart else 200, 128)
    assert recipe.schedule.options == {
        "milestones": [75, 90, 100] if mart else [100, 150],
        "factor": 0.1,
        "clock": "step" if rice else "epoch_from_1",
    }
    assert recipe.attack.bn_mode == ("train" if rice else "eval")


@pytest.mark.parametrize("name", GRID)
def test_data_and_network_are_the_papers(name: str) -> None:
    recipe = loaded(name)
    data, method, _ = name.split("_")
    svhn, rice = data == "svhn", method in ("at", "alp")
    assert recipe.data.name == data
    assert recipe.model.name == ("resnet18" if method == "mart" else "preact_resnet18")
    assert recipe.model.normalize == (data if rice else None)
    assert recipe.model.num_classes == (100 if data == "cifar100" else 10)
    assert recipe.data.augment.model_dump() == {
        "crop": 0 if svhn else 4,
        "crop_fill": "reflect" if rice and data == "cifar10" else "zero",
        "flip": not svhn,
        "rotation": 15.0 if rice and data == "cifar100" else 0.0,
        "rotation_mode": "bilinear",
        "shift": 0,
        "erase": 0.0,
        "cutout": 0,
        "brightness": 0.0,
        "mixup": 0.0,
        "cutmix": 0.0,
    }


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("at", {}),
        ("trades", {"beta": 6}),
        ("mart", {"beta": 5}),
        ("alp", {"weight": 0.5, "pair": "logits"}),
    ],
)
def test_objective_constants(method: str, options: dict[str, Any]) -> None:
    for data, norm in product(DATA, NORMS):
        objective = load_recipe(f"{data}_{method}_{norm}").objective
        assert (objective.name, objective.options) == (method, options)


def test_kept_epochs_are_the_papers() -> None:
    awp = Keep(**load_recipe("cifar10_at_linf").train.keep.model_dump())
    assert [e for e in range(1, 201) if awp.wants(e)] == list(range(10, 201, 10))
    rat = Keep(**load_recipe("cifar10_trades_linf").train.keep.model_dump())
    windows = {*range(100, 110), *range(150, 160)}
    assert {e for e in range(1, 201) if rat.wants(e)} == windows | set(range(100, 201, 5))


@pytest.mark.parametrize(
    ("name", "base", "network"),
    [
        ("cifar10_at_linf_wrn34", "cifar10_at_linf", "wide_resnet34_10"),
        ("cifar10_trades_linf_wrn34", "cifar10_trades_linf", "wide_resnet34_10"),
        ("cifar10_trades_linf_vgg16", "cifar10_trades_linf", "vgg16_bn"),
        ("cifar10_trades_linf_mobilenetv2", "cifar10_trades_linf", "mobilenet_v2"),
    ],
)
def test_other_networks_change_only_the_network(name: str, base: str, network: str) -> None:
    assert loaded(name).training_keys() == load_recipe(base, {"model.name": network}).training_keys()


def test_mnist_constants() -> None:
    for name in MNIST:
        recipe = loaded(name)
        assert (recipe.threat.eps, inner(recipe).step_size, inner(recipe).steps) == (0.3, 0.01, 40)
        assert recipe.model.name == "mnist_cnn"
    assert load_recipe("mnist_trades_linf").objective.options == {"beta": 1}


def test_mnist_constants_of_atent_and_entropy_sgd() -> None:
    walk = {"name": "langevin", "average": 0.9, "project": "every", "bn_mode": "train"}
    linf = {**walk, "steps": 80, "step_size": 0.01, "noise": 1e-4, "gamma": 0}
    l2 = {**walk, "steps": 40, "step_size": 2.5 * 2 / 40, "noise": 1e-2, "gamma": 0.05}
    assert loaded("mnist_atent_linf").attack.model_dump() == linf
    assert loaded("mnist_atent_l2").attack.model_dump() == l2
    assert (loaded("mnist_atent_l2").model.name, loaded("mnist_atent_l2").train.batch_size) == ("lenet5", 50)
    for name in ("mnist_sgd", "mnist_entropy_sgd"):
        recipe = loaded(name)
        assert (recipe.optimizer.lr, recipe.train.batch_size, recipe.train.epochs) == (0.1, 128, 50)
        assert recipe.objective.name == "standard"
    flat = loaded("mnist_entropy_sgd").optimizer
    assert flat.name == "entropy_sgd"
    assert flat.options == {
        "steps": 5, "gamma": 1e-3, "inner_lr": 0.1, "alpha": 0.25, "noise": 1e-4, "outer": "code"
    }  # fmt: skip


def test_trh_on_cifar_has_the_papers_weights_and_our_decay() -> None:
    for method, weight in {"at": 5e-4, "trades": 1e-4}.items():
        by_hand = {"flatness": [{"name": "trh", "weight": weight, "schedule": "multistep"}]}
        recipe = loaded(f"cifar10_{method}_trh")
        expected = load_recipe(f"cifar10_{method}_linf", by_hand)
        assert {**recipe.training_keys(), "flatness": None} == {**expected.training_keys(), "flatness": None}
        assert FLATNESS.make("trh", **recipe.flatness[0].options) == FLATNESS.make(
            "trh", **expected.flatness[0].options
        )


def test_trh_on_a_transformer_has_the_papers_settings() -> None:
    for method, weight in {"at": 1e-5, "trades": 1e-4}.items():
        recipe = loaded(f"cifar10_{method}_trh_vit_b")
        assert (recipe.model.name, recipe.model.normalize) == ("vit_b4", "centered")
        options = {"weight": weight, "schedule": "multistep", "gamma": 1e-3}
        assert FLATNESS.make("trh", **recipe.flatness[0].options) == FLATNESS.make("trh", **options)
        assert (recipe.train.batch_size, recipe.optimizer.lr, recipe.optimizer.weight_decay) == (768, 0.1, 0)
        assert (recipe.schedule.name, recipe.schedule.options["warmup"] * -(-49_000 // 768)) == ("warmup_cosine", 500)
        assert (inner(recipe).steps, step_size(recipe, inner(recipe))) == (10, pytest.approx(2 / 255, rel=1e-15))
        assert recipe.data.augment.model_dump(exclude_defaults=True) == {"flip": True, "brightness": 0.1}
        assert recipe.objective.name == method


def test_fine_tuning_has_atents_rate_length_and_walk() -> None:
    recipe, whole = loaded("cifar10_atent_finetune_wrn34"), loaded("cifar10_atent_linf_wrn34")
    assert (recipe.optimizer.lr, recipe.train.epochs, recipe.schedule.name) == (1e-4, 20, "constant")
    assert (recipe.model.name, recipe.threat, recipe.attack) == ("wide_resnet34_10", whole.threat, whole.attack)


def test_trh_on_imagenet_has_the_papers_settings() -> None:
    values = {
        "at": (1e-4, "multistep"),
        "at_l2": (5e-5, "linear"),
        "trades": (5e-5, "linear"),
        "trades_l2": (5e-5, "linear"),
    }
    for name, (weight, schedule) in values.items():
        method, _, norm = name.partition("_")
        recipe = loaded(f"imagenet_{method}_trh_vit_b{'_l2' if norm else ''}")
        assert (recipe.model.name, recipe.model.num_classes, recipe.model.normalize) == ("vit_b16", 1000, "symmetric")
        options = {"weight": weight, "schedule": schedule, "gamma": 1e-4}
        assert FLATNESS.make("trh", **recipe.flatness[0].options) == FLATNESS.make("trh", **options)
        assert (recipe.train.batch_size, recipe.optimizer.lr) == (64, 0.01)
        steps = -(-(1_281_167 - recipe.data.held_out) // 64)
        assert (recipe.schedule.name, recipe.schedule.options["warmup"] * steps) == (
            "warmup_cosine",
            pytest.approx(500),
        )
        assert (recipe.threat.norm, recipe.threat.eps) == (("l2", 3) if norm else ("linf", 4 / 255))
        assert inner(recipe).steps == 7
        assert recipe.data.augment.model_dump(exclude_defaults=True) == {"flip": True, "brightness": 0.1}
        assert recipe.objective.name == method


def test_moons_radius_is_the_papers_in_stored_units() -> None:
    recipe = load_recipe("moons_at")
    assert recipe.threat.eps * SCALE == pytest.approx(0.02, rel=1e-15)
    assert (inner(recipe).steps, recipe.train.epochs, recipe.optimizer.lr) == (1, 100, 0.1)
    assert load_recipe("moons_standard").training_keys()["attack"]["name"] == "none"


@pytest.mark.parametrize(("data", "sigma"), [("digits", 0.25), ("cifar10", 0.12)])
def test_noise_of_the_smoothing_recipes(data: str, sigma: float) -> None:
    noisy, stable = loaded(f"{data}_smooth"), loaded(f"{data}_trades_smooth")
    for recipe in (noisy, stable):
        assert (recipe.attack.name, recipe.attack.options) == ("gaussian", {"sigma": sigma})
        assert recipe.threat.norm == "l2"
    assert (noisy.objective.name, stable.objective.name) == ("at", "trades")
    assert stable.objective.options == {"beta": 6}
    others = [{**r.training_keys(), "objective": None} for r in (noisy, stable)]
    assert others[0] == others[1]


def test_smoothing_on_cifar_has_atents_network_and_the_steps_of_trades_smoothing() -> None:
    recipe = loaded("cifar10_smooth")
    assert (recipe.model.name, recipe.threat.eps, recipe.train.batch_size) == ("resnet20", 0.435, 256)
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.train.epochs) == (0.1, 1e-4, 55)
    assert recipe.schedule.options["milestones"] == [50]


def test_trades_smoothing_has_the_settings_of_its_code() -> None:
    recipe, other = loaded("cifar10_trades_smooth_pgd"), loaded("cifar10_trades_smooth")
    assert recipe.attack.options == {"sigma": 0.12, "steps": 10, "step_size": 2 * 0.435 / 10, "box": "first"}
    assert (recipe.attack.bn_mode, recipe.threat.norm, recipe.threat.eps) == ("eval", "l2", 0.435)
    assert (recipe.model.name, recipe.model.normalize, recipe.train.batch_size) == ("resnet20", None, 256)
    without = [{**r.training_keys(), "attack": None} for r in (recipe, other)]
    assert without[0] == without[1]
    digits = loaded("digits_trades_smooth_pgd")
    assert digits.attack.options == {
        "sigma": 0.25,
        "steps": 10,
        "step_size": 2 * digits.threat.eps / 10,
        "box": "first",
    }


def test_atent_to_be_smoothed_has_the_noise_of_its_text() -> None:
    recipe, other = loaded("cifar10_atent_l2_smooth"), loaded("cifar10_atent_l2_noise")
    for r, noise in ((recipe, 0.12), (other, 0.12)):
        assert r.attack.options["noise"] * (2 * r.attack.options["step_size"]) ** 0.5 == pytest.approx(noise, abs=5e-4)
    assert (recipe.attack.options["step_size"], recipe.attack.options["noise"]) == (0.02, 0.6)
    changed = {"attack.step_size": 0.02, "attack.noise": 0.6}
    assert recipe.training_keys() == load_recipe("cifar10_atent_l2_noise", changed).training_keys()


def test_every_objective_method_and_optimizer_of_a_paper_has_a_recipe() -> None:
    assert set(OBJECTIVES.names()) <= {loaded(n).objective.name for n in EXPECTED}
    assert set(FLATNESS.names()) <= {f.name for n in EXPECTED for f in loaded(n).flatness}
    assert {"sgd", "entropy_sgd"} <= {loaded(n).optimizer.name for n in EXPECTED}
