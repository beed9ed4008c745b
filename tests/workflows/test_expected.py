"""Bands of recipes: what is refused, whose they are, and that those of the library follow from measured rows."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from results_cases import fake_run
from table_cases import TINY

from flatrock.core.bands import band, bands_text, measured_bands, off
from flatrock.core.errors import BusyError, ConfigError, StateError
from flatrock.core.rows import Row, Score, read_rows
from flatrock.engine.folder import RunFolder
from flatrock.evaluation.journal import journaled
from flatrock.recipes.load import library, load_recipe, recipe_names, summaries
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.restore import stored_recipe
from flatrock.recipes.text import recipe_text
from flatrock.workflows.expected import expected_bands
from flatrock.workflows.results import collect_run, take_attacks

RESULTS = Path(__file__).parents[2] / "results"
# Rows whose bands are in the library.
EVIDENCE = sorted([*RESULTS.glob("cifar10_*.json"), *RESULTS.glob("bands/*.json")])
BANDS = {"clean": (90.0, 95.0), "pgd-20": (1.0, 2.5)}
GIVEN = "base: digits_at\nabout: {summary: mine, expect: much, bands: {clean: [90, 95], pgd-20: [1, 5/2]}}\n"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(GIVEN)
    return path


def measured() -> list[Row]:
    return [row for file in EVIDENCE for row in read_rows(file) or []]


def test_the_bands_of_the_library_are_those_that_follow_from_its_results() -> None:
    """None is typed by hand: `flatrock bands results/cifar10_*.json results/bands/*.json` prints them."""
    found = {name: dict(load_recipe(name).about.bands) for name in recipe_names()}
    assert {name: bands for name, bands in found.items() if bands} == measured_bands(measured())


def test_what_was_measured_is_what_the_library_says_today() -> None:
    """Of a recipe that was changed since, bands would be of another."""
    rows = measured()
    assert len(rows) > 100 and {row.recipe for row in rows} <= library().keys()
    assert not [row.recipe for row in rows if row.changes or not row.comparable]
    hashes = {(row.recipe, row.seed): row.recipe_hash for row in rows}
    assert hashes == {key: recipe_hash(load_recipe(key[0], {"seed": key[1]})) for key in hashes}
    assert all(row.provenance["commit"] and row.provenance["device"] and row.provenance["time"] for row in rows)


def covered(k: int) -> tuple[int, int]:
    """Of all measures of recipes with several seeds: how many shares of another seed are in the band of k, and all."""
    seen: dict[str, list[Score]] = {}
    for found in measured():
        seen.setdefault(found.recipe, []).append(found.scores[found.main or ""])
    within = total = 0
    for scores in seen.values():
        for some in combinations(scores, k):
            for name in scores[0].right if len(scores) > k else ():
                known = band([score.accuracy[name] for score in some], some[0].n)
                others = [score.accuracy[name] for score in scores if score not in some]
                within, total = within + sum(off(share, known) == 0 for share in others), total + len(others)
    return within, total


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_band_of_some_seeds_holds_others(k: int) -> None:
    within, total = covered(k)
    assert total > 500 and within >= 0.985 * total


def test_recipes_that_were_not_measured_have_no_band_and_those_that_were_do_not_say_they_were_not() -> None:
    for name in recipe_names():
        about = load_recipe(name).about
        assert not (about.bands and "not measured" in about.expect), name


def test_digits_are_told_once() -> None:
    """Where there are bands, no other range of the same measures is in the text."""
    for name in (n for n in recipe_names() if load_recipe(n).about.bands):
        text = load_recipe(name).about.expect.lower()
        assert not re.search(r"\b(clean|fgsm|cw-20) \d", text), f"{name}: {text}"


def test_bands_are_for_people_not_for_training(mine: Path) -> None:
    with_bands = load_recipe(mine)
    mine.write_text("base: digits_at\n")
    without = load_recipe(mine)
    assert dict(with_bands.about.bands) == BANDS and without.about.bands == {}
    assert recipe_hash(with_bands) == recipe_hash(without)
    assert with_bands.judged_keys() == without.judged_keys()


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("{clean: 99}", "about.bands.clean: got 99, but a band is [lowest, highest] in percent of the test set"),
        ("{clean: [99]}", "about.bands.clean: got [99], but a band is"),
        ("{clean: [99, 98]}", "about.bands.clean: got [99, 98], but a band is"),
        ("{clean: [-1, 98]}", "about.bands.clean: got [-1, 98], but a band is"),
        ("{clean: [0, 101]}", "about.bands.clean: got [0, 101], but a band is"),
        ("{clean: [0, .nan]}", "about.bands.clean: got [0, nan], "),
        ("{clean: [low, 98]}", "about.bands.clean: got ['low', 98], expected a number"),
        ("{pgd20: [0, 1]}", "about.bands: unknown measure 'pgd20'; known: clean, cw-20, fgsm, pgd-20; did"),
        ("{autoattack: [0, 1]}", "about.bands: unknown measure 'autoattack'"),
    ],
)
def test_what_is_no_band_is_refused(mine: Path, given: str, fault: str) -> None:
    mine.write_text(f"base: digits_at\nabout: {{bands: {given}}}\n")
    with pytest.raises(ConfigError) as error:
        load_recipe(mine)
    assert fault in str(error.value)


def test_a_plan_is_one_measure(mine: Path) -> None:
    mine.write_text("base: digits_at\nevaluate: {attacks: [fast]}\nabout: {bands: {fast: [0, 1]}}\n")
    assert load_recipe(mine).about.bands == {"fast": (0.0, 1.0)}
    mine.write_text("base: digits_at\nevaluate: {attacks: [bogus]}\nabout: {bands: {fast: [0, 1]}}\n")
    with pytest.raises(ConfigError, match="has 1 fault") as error:
        load_recipe(mine)
    assert "bogus" in str(error.value) and "bands" not in str(error.value)


@pytest.mark.parametrize(
    "override",
    ["train.epochs=3", "threat.eps=0.1", "evaluate.attacks=[fgsm]", "data.limit=512", "flatness=awp"],
)
def test_overrides_that_change_the_numbers_drop_what_was_expected(mine: Path, override: str) -> None:
    about = load_recipe(mine, [override]).about
    assert (about.bands, about.expect) == ({}, "")
    assert (about.summary == "mine") is override.startswith("evaluate")
    assert load_recipe("digits_at", [override]).about.bands == {}


@pytest.mark.parametrize(
    "override",
    [
        "seed=3",
        "train.epochs=20",
        "threat.eps=1/5",
        "train.save_seconds=7",
        "evaluate.batch_size=10",
        "engine.compile=false",
    ],
)
def test_overrides_that_change_no_number_keep_it(mine: Path, override: str) -> None:
    about = load_recipe(mine, [override]).about
    assert (dict(about.bands), about.expect) == (BANDS, "much")
    assert load_recipe("digits_at", [override]).about == load_recipe("digits_at").about


def test_bands_of_an_override_are_kept(mine: Path) -> None:
    bands = load_recipe(mine, ["train.epochs=3", "about.bands={clean: [1, 2]}"]).about.bands
    assert bands == {"clean": (1.0, 2.0), "pgd-20": (1.0, 2.5)}


def test_a_fault_is_told_as_it_was(mine: Path) -> None:
    with pytest.raises(ConfigError, match="has 1 fault"):
        load_recipe(mine, ["train.epochs=-3"])


def test_a_base_passes_no_bands_on(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.yaml").write_text("base: mine\n")
    assert load_recipe(tmp_path / "other.yaml").about.bands == {}
    monkeypatch.setattr("flatrock.recipes.load.LIBRARY", tmp_path)  # whose bases speak for their recipes
    about = load_recipe(tmp_path / "other.yaml").about
    assert (about.summary, about.expect, about.bands) == ("mine", "much", {})


def test_the_header_and_the_list_tell_them(mine: Path) -> None:
    text = recipe_text(load_recipe(mine))
    assert "# expect: clean 90-95, pgd-20 1-2.5 (percent); much\n" in text
    about = load_recipe("digits_at").about
    assert summaries()["digits_at"] == f"{about.summary}; expect {bands_text(about.bands)}"
    assert summaries()["cifar10_at_linf"] == load_recipe("cifar10_at_linf").about.summary


def test_a_run_with_other_attacks_has_no_bands_of_those_before(mine: Path, tmp_path: Path) -> None:
    recipe = load_recipe(mine)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_recipe(recipe_text(recipe))
    take_attacks(folder, load_recipe(mine, ["evaluate.attacks=[fgsm]"]))
    stored = stored_recipe(folder)
    assert (stored.evaluate.attacks, stored.about.bands) == (("fgsm",), {})


HALF = (".exam.json.part", ".chunk-000000.safetensors.part")


@pytest.mark.parametrize("left", [(), HALF[:1], ("exam.json", HALF[1]), ("chunk-000000.safetensors",)])
def test_what_a_killed_process_left_is_no_evaluation_with_other_attacks(
    mine: Path, tmp_path: Path, left: tuple[str, ...]
) -> None:
    """Killed before its first batch, or without its question, which the next evaluation would refuse to go on from."""
    folder = RunFolder(tmp_path / "run")
    journal = folder.path / "result-last.part"
    journal.mkdir(parents=True)
    for name in left:
        (journal / name).write_text("{}")
    folder.write_recipe(recipe_text(load_recipe(mine)))
    take_attacks(folder, load_recipe(mine, ["evaluate.attacks=[fgsm]"]))
    assert stored_recipe(folder).evaluate.attacks == ("fgsm",)
    assert not journal.exists()


def test_finished_batches_with_other_attacks_are_not_lost(mine: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    files = [
        folder.path / f"result-{name}"
        for name in ("best.part/.exam.json.part", "last.part/exam.json", "last.part/chunk-000000.safetensors")
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    folder.write_recipe(recipe_text(load_recipe(mine)))
    told = r"result-last\.part holds 1 finished batches .* finish it with `flatrock eval .* --which last --resume`"
    with pytest.raises(StateError, match=told):
        take_attacks(folder, load_recipe(mine, ["evaluate.attacks=[fgsm]"]))
    assert all(file.is_file() for file in files)
    take_attacks(folder, load_recipe(mine))  # the same attacks: nothing to take


def test_an_evaluation_that_just_began_with_other_attacks_is_left_alone(mine: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_recipe(recipe_text(load_recipe(mine)))
    begun = journaled(folder.path / "result-best.part", {"attacks": "before"}, resume=False)
    with begun, pytest.raises(BusyError, match=r"evaluating into .*result-best\.part"):
        take_attacks(folder, load_recipe(mine, ["evaluate.attacks=[fgsm]"]))
    assert (folder.path / "result-best.part" / "exam.json").is_file()


def row(folder: Path, name: str, **how: Any) -> Row:
    return collect_run(fake_run(folder, name, {"clean": 80.0, "pgd-20": 51.0}, **how))


def test_of_what_rows_something_is_expected(tmp_path: Path) -> None:
    known = row(tmp_path / "a", "digits_at")
    seeded = row(tmp_path / "b", "digits_at", overrides={"seed": 7})
    changed = row(tmp_path / "c", "digits_at", overrides={"train.epochs": 3})
    failed = row(tmp_path / "d", "digits_trades", status="failed")
    unmeasured = row(tmp_path / "e", "cifar10_at_linf")
    found = expected_bands([known, seeded, changed, failed, unmeasured])
    assert found == {r.key: load_recipe("digits_at").about.bands for r in (known, seeded)}


def test_rows_of_an_older_recipe_of_that_name_are_compared_with_nothing(tmp_path: Path) -> None:
    known = row(tmp_path, "digits_at")
    assert expected_bands([replace(known, recipe_hash="0123456789abcdef"), replace(known, recipe="digits_gone")]) == {}


def test_bands_of_a_file_are_found_in_the_file(mine: Path, tmp_path: Path) -> None:
    recipe = load_recipe(mine)
    own = replace(row(tmp_path, "digits_at"), recipe="mine", recipe_hash=recipe_hash(recipe), own=True)
    assert expected_bands([own]) == {}
    assert expected_bands([own], [recipe]) == {own.key: BANDS}
    assert expected_bands([own], [load_recipe(mine, TINY)]) == {}
