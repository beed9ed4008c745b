"""Published tables: their figures are known for every row of ours, once, and are those the recipes quote."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from recipe_table_cases import EXPECTED

import flatrock
from flatrock.core.rows import DISTANCE
from flatrock.recipes.further import measures_of
from flatrock.recipes.load import load_recipe, recipe_names
from flatrock.reports.papers import OWN, TABLES, Entry, Protocol, known_papers

PROTOCOLS = known_papers(None, Path("nowhere")).protocols
ROWS = [(table, name) for table, names in EXPECTED.items() for name in names]
TOLD = [table for table, part in PROTOCOLS.items() if part.published]
BESIDE = [(table, name) for table in TOLD for name in PROTOCOLS[table].rows]
# TrH prints curvature of its moons, and values of methods; what our recipes expect was measured here.
NO_ACCURACY = ("trh_moons", "trh_table5", "trh_table6")
# Printed and not measured by attacks: seconds, which stand in the table of costs, and a maximum over a run.
NEVER_MEASURED = {"seconds", "best-clean"}
NETWORKS = {
    "preact_resnet18": "PreActResNet-18",
    "wide_resnet34_10": "WRN-34-10",
    "wide_resnet34_20": "WRN-34-20",
    "wide_resnet28_10": "WRN-28-10",
    "wide_resnet28_4": "WRN-28-4",
    "resnet20": "ResNet-20",
    "vgg16_bn": "VGG-16",
    "mobilenet_v2": "MobileNetV2",
    "vit_b4": "ViT-B16",
    "hybrid_l16": "Hybrid-L16",
}


def entry_of(table: str, name: str) -> Entry:
    return PROTOCOLS[table].rows[name]


def printed(entry: Entry) -> set[float]:
    """Every number set beside a row."""
    return {value for figure in entry.papers for value in figure.values.values()}


def quoted(name: str) -> set[float]:
    """The figures in a recipe's text: neither radii nor what follows a sign of plus and minus."""
    text = re.sub(r"(eps|\+-) \S+", "", load_recipe(name).about.expect)
    return {float(number) for number in re.findall(r"\d+\.\d+", text)}


def test_numbers_are_told_from_radii() -> None:
    assert quoted("cifar10_atent_l2") == {85.44, 65.12, 47.38}
    assert quoted("cifar10_atent_l2_k5") == {142.47}


@pytest.mark.parametrize(("table", "name"), ROWS)
def test_a_row_of_a_table_has_the_figures_it_quotes(table: str, name: str) -> None:
    """A table added without figures fails here, and so does a figure changed in one of its two places."""
    entry = entry_of(table, name)
    if table in NO_ACCURACY:
        assert not entry.figures
        return
    assert entry.papers
    everywhere = [printed(part.rows[name]) for part in PROTOCOLS.values() if name in part.rows]
    assert printed(entry) <= quoted(name) <= set().union(*everywhere)


@pytest.mark.parametrize("name", sorted({n for table, n in BESIDE if table not in NO_ACCURACY} - {n for _, n in ROWS}))
def test_a_baseline_quotes_what_some_table_prints(name: str) -> None:
    known = [printed(part.rows[name]) for part in PROTOCOLS.values() if name in part.rows]
    assert quoted(name) <= set().union(*known)


@pytest.mark.parametrize("table", TOLD)
def test_differences_are_between_figures_of_the_two_rows(table: str) -> None:
    part = PROTOCOLS[table]
    for entry in part.rows.values():
        assert entry.over is not None or not entry.claims
        for new, old in entry.claims:
            assert new in entry.papers and old in part.rows[entry.over or ""].papers
            assert new.end == old.end and new.values.keys() & old.values.keys() & part.measured.keys()
        for best, last in entry.drops:
            assert (best.end, last.end) == ("best", "last") and best in entry.papers and last in entry.papers


@pytest.mark.parametrize(("table", "name"), BESIDE)
def test_figures_are_of_the_network_and_the_attacks_of_the_recipe(table: str, name: str) -> None:
    part, entry, recipe = PROTOCOLS[table], entry_of(table, name), load_recipe(name)
    for figure in entry.papers:
        if figure.network != "network not named":
            assert figure.network == NETWORKS[recipe.model.name]
            assert figure.network in part.networks
        assert figure.values.keys() <= part.measures.keys() | {"cw-20", "rays", "adbd"}
    has = {"clean", *map(str, recipe.evaluate.attacks)}
    assert has <= {attack for measure in part.measured.values() for attack in measure.attacks}, "all of ours is shown"
    has |= {measure for asked in recipe.evaluate.more for measure in measures_of(asked, recipe.threat)}
    has |= {f"{DISTANCE}{measure}" for measure in has if measure.startswith("rays")}
    found = {key for key, measure in part.measured.items() if has.intersection(measure.attacks)}
    asked = {key for figure in entry.papers for key in figure.values if key in part.measures}
    assert asked - found <= NEVER_MEASURED, "all that a paper prints beside a row of ours is measured"


def test_what_no_attack_measures_is_these_alone() -> None:
    unmeasured = {key for table in TOLD for key in PROTOCOLS[table].measures.keys() - PROTOCOLS[table].measured.keys()}
    assert unmeasured == NEVER_MEASURED


def test_both_rows_of_a_difference_are_attacked_alike() -> None:
    """In every measure for which the paper prints both."""
    for part in (PROTOCOLS[table] for table in TOLD):
        for name, entry in part.rows.items():
            for new, old in entry.claims:
                both = [load_recipe(n) for n in (name, entry.over or "")]
                has = [{"clean", *map(str, r.evaluate.attacks)} for r in both]
                for one, recipe in zip(has, both, strict=True):
                    one |= {m for asked in recipe.evaluate.more for m in measures_of(asked, recipe.threat)}
                for key in new.values.keys() & old.values.keys() & part.measured.keys() - {"adbd"}:
                    assert has[0] & has[1] & set(part.measures[key].attacks), (part.title, name, key)


def titles(part: Protocol) -> str:
    return f"{part.title} {part.text}"


@pytest.mark.parametrize("table", TOLD)
def test_a_table_says_what_it_is_of(table: str) -> None:
    """Number, data and radii of its rows, networks."""
    said, part = titles(PROTOCOLS[table]), PROTOCOLS[table]
    paper, _, number = table.partition("_")
    assert {"rat": "RAT", "awp": "AWP", "s2o": "S2O", "atent": "ATENT", "trh": "TrH"}[paper] in part.title
    if digits := re.fullmatch(r"table(\d)|s(\d)", number):
        assert f"Table {digits[1] or f'S{digits[2]}'}" in part.title
    recipes = [load_recipe(name) for name in part.rows]
    assert {{"l2": "L2", "linf": "Linf"}[recipe.threat.norm] for recipe in recipes} <= set(re.findall(r"\w+", said))
    data = {recipe.data.name for recipe in recipes}
    names = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN", "moons": "moons", "imagenet": "ImageNet"}
    assert "three data sets" in said.lower() if len(data) == 3 else all(names[one] in said for one in data)


def test_generated_images_behind_figures_are_told() -> None:
    """TrH trains on CIFAR with DDPM images, our rows have none."""
    part = PROTOCOLS["trh_table7"]
    assert "DDPM" in part.text
    for name, entry in part.rows.items():
        assert load_recipe(name).data.extra is None
        assert all("DDPM" in figure.differs for figure in entry.papers)


def test_every_recipe_and_every_figure_is_there_once() -> None:
    assert {name for part in PROTOCOLS.values() for name in part.rows} <= set(recipe_names())
    assert set(EXPECTED) <= set(TOLD)
    raws = [yaml.safe_load(path.read_text()) for path in (OWN, *sorted(TABLES.glob("*.yaml")))]
    keys = [key for raw in raws for key in raw["figures"]]
    assert len(set(keys)) == len(keys)
    rows = [entry for part in PROTOCOLS.values() for entry in part.rows.values()]
    used = {(figure.where, str(figure.values)) for entry in rows for figure in entry.figures}
    assert len(used) == len(keys), "two figures are alike, or nobody asks for one"


def test_they_come_with_the_package() -> None:
    root = Path(flatrock.__file__).parent
    project = tomllib.loads((root.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["flatrock"]
    packed = {path for pattern in patterns for path in root.glob(pattern)}
    assert set(root.rglob("*.yaml")) - packed == set()
