"""Published tables: every row is there, is what the paper describes and no more, and quotes the paper's figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import yaml
from recipe_table_cases import EXPECTED, WITHOUT

from flatrock.recipes.load import TABLES, library, load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.schema import Recipe

ROWS = [(table, name) for table, rows in EXPECTED.items() for name in rows]

# Rows a table quotes from other papers, with settings of their own.
QUOTED = ("cifar10_mart_linf_wrn34", "cifar10_at_linf_wrn34_20")
# The keys in which the other rows differ from each other: what a table is about, and what follows from it. (awp_models
# and atent_s4 collect unrelated rows and compare nothing.)
DATA_SETS = {"data.name", "data.augment.crop", "data.augment.flip", "model.num_classes", "optimizer.lr"}
REGULARISERS = {"optimizer.l1", "optimizer.decay_on", "optimizer.weight_decay"}
REGULARISERS |= {"data.augment.cutout", "data.augment.mixup"}
TRADES = {"objective.name", "objective.beta", "attack.name"}
RADII = {"threat.norm", "threat.eps", "attack.step_size"}
THREATS = {"threat.norm", "threat.eps", "attack.step_size", "select.attack.step_size"}
WALK = {
    f"attack.{k}" for k in ("name", "bn_mode", "average", "drift", "gamma", "noise", "project", "start", "step_size")
}
ABOUT = {
    "rat_table1": {"flatness"},
    "rat_table2": {"flatness", "data.name", "model.num_classes"},
    "rat_table3": {"flatness", *DATA_SETS},
    "rat_table4": {"flatness", *DATA_SETS},
    "rat_table5": {"flatness", "model.name"},
    "rat_table8": set(),
    "s2o_models": {"flatness", "model.name", "objective.name", "objective.beta", "attack.name", "attack.start"},
    "awp_table3": {"flatness", "data.augment.crop_fill", "data.augment.rotation", "model.normalize"}
    | DATA_SETS
    | THREATS,
    "awp_table4": REGULARISERS,
    "awp_table5": REGULARISERS,
    "atent_s1": {"threat.eps", "model.name", *WALK},
    "atent_s3": set(),
    "trh_moons": {"flatness"},
    "trh_table5": {"flatness", "model.name", "data.name", "model.num_classes", *TRADES},
    "trh_table6": {"flatness", "model.name", "optimizer.weight_decay", *TRADES, *RADII},
    "trh_table7": {"flatness", "data.name", "model.num_classes", *TRADES},
    "trh_table8": {"flatness", "optimizer.weight_decay", *TRADES, *RADII},
}
HASHES = {
    "cifar10_at_l2_cutout": "63f3797a6ee51c60",
    "cifar10_at_l2_l1": "c129d1433dbf6acd",
    "cifar10_at_l2_l2": "dfb718b207c36eca",
    "cifar10_at_l2_mixup": "0226c5904d87af4a",
    "cifar10_at_linf_cutout": "d49f5679615bd3de",
    "cifar10_at_linf_l1": "35e2c506ac49691f",
    "cifar10_at_linf_l2": "6c1a7ac85de89f47",
    "cifar10_at_linf_mixup": "6850a4f26b8c99df",
}


@cache
def loaded(name: str) -> Recipe:
    """The recipe as it stands."""
    return load_recipe(name)


def text_of(table: str) -> str:
    return library()[next(iter(EXPECTED[table]))].read_text()


def header(table: str) -> list[str]:
    """The lines of the comment a table opens with."""
    lines = text_of(table).splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]


def leaves(keys: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted keys and their values; a list is one value."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        found |= leaves(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found


def test_the_tables_are_these() -> None:
    assert {p.stem for p in TABLES.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("table", EXPECTED)
def test_a_table_has_exactly_its_rows(table: str) -> None:
    assert set(yaml.safe_load(text_of(table))["rows"]) == set(EXPECTED[table])


@pytest.mark.parametrize(("table", "name"), ROWS)
def test_a_row_is_what_the_paper_describes_and_no_more(table: str, name: str) -> None:
    row = EXPECTED[table][name]
    assert loaded(name).training_keys() == load_recipe(row.base, row.keys).training_keys()


@pytest.mark.parametrize(("table", "name"), ROWS)
def test_a_row_quotes_its_figures_and_its_source(table: str, name: str) -> None:
    about = loaded(name).about
    quoted = iter(re.findall(r"\d+\.\d+", about.expect))
    for figure in EXPECTED[table][name].figures.split():
        assert figure in quoted, f"{figure} is not quoted, or not in this place: {about.expect}"
    paper, _, number = table.partition("_")
    assert about.source.startswith({"rat": "RAT", "s2o": "S2O", "awp": "AWP", "atent": "ATENT", "trh": "TrH"}[paper])
    if digits := re.fullmatch(r"table(\d)|(s\d)", number):
        assert f"Table {(digits[1] or digits[2]).upper()}" in about.source


@pytest.mark.parametrize("table", ABOUT)
def test_rows_of_a_table_differ_only_in_what_it_is_about(table: str) -> None:
    rows = [leaves(loaded(name).training_keys()) for name in EXPECTED[table] if name not in QUOTED]
    keys = {key for row in rows for key in row}
    missing = object()
    varying = {key for key in keys if any(row.get(key, missing) != rows[0].get(key, missing) for row in rows)}
    assert varying == ABOUT[table]


@pytest.mark.parametrize("table", EXPECTED)
def test_no_two_rows_train_alike(table: str) -> None:
    hashes = [recipe_hash(loaded(name)) for name in EXPECTED[table]]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("table", EXPECTED)
def test_a_header_says_how_to_train_the_first_row(table: str) -> None:
    first = next(iter(yaml.safe_load(text_of(table))["rows"]))
    assert header(table)[1] == f"#   flatrock train {first}"
    assert len(header(table)) >= 4, "paper and code differ, and the header says how"
    assert max(len(line) for line in text_of(table).splitlines()) <= 120


@pytest.mark.parametrize("table", WITHOUT)
def test_rows_without_recipe_are_named_with_their_figures(table: str) -> None:
    said = " ".join(line.removeprefix("# ") for line in header(table))
    for row in WITHOUT[table].split("|"):
        assert row in said


@pytest.mark.parametrize("name", HASHES)
def test_recipes_that_moved_into_a_table_train_as_before(name: str) -> None:
    assert recipe_hash(loaded(name)) == HASHES[name]


def test_atent_noise_per_step_is_the_papers() -> None:
    attack = loaded("cifar10_atent_l2_noise").attack.options
    assert attack["noise"] * (2 * attack["step_size"]) ** 0.5 == pytest.approx(0.12, abs=5e-4)


def test_atent_is_attacked_by_pgd_and_by_its_own_walk() -> None:
    attacks = loaded("cifar10_atent_linf_wrn34").evaluate.attacks
    assert attacks == ("pgd-20:step_size=0.003", "langevin-20:step_size=0.003")


@pytest.mark.parametrize("name", ["cifar10_trades_rat2_linf_eta020", "cifar100_trades_awp_rat2_linf_wrn34"])
def test_the_papers_noise_is_one_override_away(name: str) -> None:
    changed = load_recipe(name, ["flatness.rat.sigma=0.01"])
    before = {f.name: f.options for f in loaded(name).flatness}
    after = {f.name: f.options for f in changed.flatness}
    assert after["rat"] == {**before["rat"], "sigma": 0.01}
    assert {**after, "rat": None} == {**before, "rat": None}
