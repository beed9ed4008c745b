"""Published tables by name: every row their pages list, what rows are built on, nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_cases import flatrock, refusal
from recipe_table_cases import EXPECTED
from results_cases import fake_run

import flatrock as library
from flatrock.cli.reproduce_table import prepare, table_rows
from flatrock.core.rows import read_rows
from flatrock.recipes.load import recipe_names
from flatrock.reports.papers import shipped_papers

CPU = ("--device", "cpu")
# Rows that a page has and the file of the table has not: baselines of other tables, and recipes of their own.
BASELINES = {
    "atent_s4": 2,
    "awp_models": 6,
    "awp_table3": 6,
    "awp_table4": 2,
    "awp_table5": 2,
    "rat_table1": 1,
    "rat_table2": 1,
    "rat_table5": 2,
    "rat_table7": 2,
    "rat_table8": 4,
    "s2o_models": 3,
    "trh_moons": 1,
    "trh_table6": 4,
    "trh_table7": 2,
}
FOUND = {"clean": 82.0, "pgd-20": 51.0}
BY_RAT = {"clean": 82.0, "pgd-20:step_size=0.003": 52.0, "cw-20:step_size=0.003": 50.0, "autoattack": 48.0}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLATROCK_DATA", raising=False)
    return tmp_path


def planned(*words: str, **options: object) -> list[str]:
    return [row.recipe.name for row in prepare(words, download=True, device="cpu", **options).rows]


def test_no_recipe_has_the_name_of_a_table() -> None:
    assert not set(table_rows()) & set(recipe_names())
    assert set(EXPECTED) <= set(table_rows())


@pytest.mark.parametrize("table", sorted(table_rows()))
def test_a_table_is_every_row_of_its_page(table: str) -> None:
    rows = table_rows()[table]
    assert rows == list(shipped_papers().protocols[table].rows) and len(set(rows)) == len(rows)
    assert set(EXPECTED.get(table, ())) <= set(rows) <= set(recipe_names())
    assert len(rows) - len(EXPECTED.get(table, ())) == BASELINES.get(table, 0)


def test_they_are_listed_with_so_many_rows() -> None:
    lines = flatrock("ls", "tables").output.splitlines()
    assert "  awp_table3  12 rows, AWP Table 3: AT and AT-AWP" in lines
    assert "  atent_s3    1 row, ATENT Table S3: PGD and its own walk as attacks" in lines
    assert [line.split()[0] for line in lines[1:]] == sorted(table_rows())


def test_baselines_come_along_and_nothing_twice() -> None:
    assert planned("awp_table3") == table_rows()["awp_table3"]
    both = planned("awp_table3", "awp_table4", "cifar10_at_linf")
    assert len(both) == len(set(both)) == 12 + 4
    assert set(both) == {*table_rows()["awp_table3"], *table_rows()["awp_table4"]}


def test_what_rows_are_built_on_comes_along_and_first() -> None:
    """HAT's helper is on no page."""
    rows = planned("rat_table8")
    assert rows.index("cifar10_standard") < rows.index("cifar10_hat_linf")
    assert set(rows) == {*table_rows()["rat_table8"], "cifar10_standard"} - {"cifar10_hat_ddpm_linf"}
    (row,) = [r for r in prepare(["rat_table8"], download=True, runs_dir=Path("x")).rows if "hat" in r.recipe.name]
    assert row.needs == (Path("x/cifar10_standard"),)


def test_what_rows_are_attacked_from_comes_along_too() -> None:
    rows = planned("rat_table4")
    at = {"cifar10_at_linf", "cifar100_at_linf", "svhn_at_linf"}
    assert set(rows) == {*table_rows()["rat_table4"], *at} and len(rows) == 9
    assert rows.index("svhn_at_linf") < rows.index("svhn_trades_awp_linf")
    without = prepare(["rat_table4"], ["evaluate.more=[]"], download=True, device="cpu").rows
    assert [row.recipe.name for row in without] == table_rows()["rat_table4"]


def test_a_row_that_lacks_images_is_left_out_unless_it_is_named() -> None:
    table = prepare(["rat_table8"], download=True, device="cpu")
    assert list(table.lacking) == ["cifar10_hat_ddpm_linf"]
    assert "data.extra.file: there is no file" in table.lacking["cifar10_hat_ddpm_linf"]
    said = " ".join(flatrock("reproduce", "rat_table8", "--download", "--dry-run", *CPU).output.split())
    assert "left out cifar10_hat_ddpm_linf: data.extra.file: there is no file" in said
    assert "5 rows, 0 of them done" in said
    named = flatrock("reproduce", "rat_table8", "cifar10_hat_ddpm_linf", "--download", *CPU)
    assert "cifar10_hat_ddpm_linf: data.extra.file: there is no file" in refusal(named)


def test_faults_of_rows_are_told_as_ever() -> None:
    said = refusal(flatrock("reproduce", "rat_table8", "--download", "train.epohcs=1", *CPU))
    assert "did you mean 'epochs'" in said
    assert "did you mean 'rat_table1'" in refusal(flatrock("reproduce", "rat_tabel1"))


def test_one_that_lacks_a_row_is_not_done(here: Path) -> None:
    """All others are there; the exit code says that some are left."""
    fake_run(here / "runs", "cifar10_at_linf", FOUND, last=FOUND)
    fake_run(here / "runs", "cifar10_at_rat2_linf", {**BY_RAT, "pgd-20": 53.0})
    fake_run(here / "runs", "cifar10_standard", FOUND)
    for name in ("cifar10_gat_linf", "cifar10_hat_linf"):
        fake_run(here / "runs", name, BY_RAT)
    done = flatrock("reproduce", "rat_table8", *CPU)
    assert done.exit_code == 3, done.output
    assert "left out cifar10_hat_ddpm_linf: data.extra.file" in " ".join(done.output.split())
    assert "Not measured yet: `cifar10_hat_ddpm_linf`." in (here / "runs/reproduce.md").read_text()
    outcome = library.reproduce("rat_table8", device="cpu")
    assert list(outcome.lacking) == ["cifar10_hat_ddpm_linf"] and len(outcome.rows) == 5


def test_a_whole_table_in_one_command(here: Path) -> None:
    done = flatrock("reproduce", "trh_moons", "train.epochs=1", "evaluate.attacks=[pgd-2]", *CPU)
    assert done.exit_code == 0, done.output
    rows = read_rows(here / "runs/reproduce.json") or []
    assert [(row.recipe, row.status) for row in rows] == [
        (name, "finished") for name in ("moons_at", "moons_at_trh_top", "moons_at_trh_full")
    ]
