"""Rows of other samples beside each other: a file of data was exchanged between two runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from results_cases import fake_run
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.core.records import read_result
from flatrock.core.rows import Row
from flatrock.core.same_samples import other_samples
from flatrock.engine.folder import RunFolder
from flatrock.workflows.results import collect_run

FOUND = {"clean": 80.0, "pgd-20": 53.0, "cw-20": 50.5, "autoattack": 49.0}
NAMES = ("cifar10_short_at", "cifar10_short_at_awp")


def made(folder: Path, name: str, *, trained: str, tested: str, data: str = "npz test", **swept: Any) -> Path:
    """A run on data of these digests, with this key of `train` changed."""
    path = fake_run(folder, name, FOUND, overrides={f"train.{key}": value for key, value in swept.items()})
    file, run = path / "result-best.json", RunFolder(path)
    result = read_result(file)
    about = {**result.provenance, "data": data, "samples_digest": tested}
    file.write_text(replace(result, provenance=about).to_json())
    run.write_info(provenance={**run.read_info()["provenance"], "training_set": trained})
    return path


def named(*paths: Path) -> list[tuple[str, Row]]:
    return [(path.name, collect_run(path)) for path in paths]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"trained": "a", "tested": "b"}, []),
        ({"trained": "a", "tested": "c"}, ["tested on"]),
        ({"trained": "c", "tested": "b"}, []),
        ({"trained": "c", "tested": "c", "data": "digits test"}, []),
    ],
)
def test_other_test_samples_under_one_name_are_told(tmp_path: Path, second: dict[str, Any], said: list[str]) -> None:
    """What another recipe is trained on is its own affair."""
    paths = made(tmp_path, NAMES[0], trained="a", tested="b"), made(tmp_path, NAMES[1], **second)
    tail = f"other samples than {NAMES[0]}, though the data has the same name"
    assert other_samples(named(*paths)) == [f"{NAMES[1]}: {how} {tail}" for how in said]


def test_a_recipe_trained_on_other_samples_is_told(tmp_path: Path) -> None:
    paths = [made(tmp_path / way, NAMES[0], trained=way, tested="b") for way in ("x", "y")]
    rows = [(str(path.parent.name), row) for path, (_, row) in zip(paths, named(*paths), strict=True)]
    assert other_samples(rows) == ["y: trained on other samples than x, though the data has the same name"]
    older = [fake_run(tmp_path / "old", NAMES[0], FOUND)]
    assert other_samples([*named(*older), *rows[:1]]) == [], "rows of before do not tell"


def test_pages_and_tables_say_it(tmp_path: Path) -> None:
    paths = [made(tmp_path, name, trained="a", tested=name) for name in NAMES]
    done = CliRunner().invoke(app, ["results", *map(str, paths), "--out", str(tmp_path / "rows.json")])
    said = f"tested on other samples than {NAMES[0]} (seed 0)"
    assert done.exit_code == 0 and f"not comparable {NAMES[1]} (seed 0): {said}" in " ".join(done.output.split())
    done = CliRunner().invoke(app, ["report", str(tmp_path / "rows.json"), "--out", str(tmp_path / "page.md")])
    assert done.exit_code == 0
    assert "- AT + AWP (seed 0): tested on other samples than AT (seed 0)" in (tmp_path / "page.md").read_text()


def test_settings_of_a_sweep_are_told_apart(tmp_path: Path) -> None:
    paths = [made(tmp_path / str(n), NAMES[0], trained="a", tested=str(n), epochs=n) for n in (2, 3)]
    done = CliRunner().invoke(app, ["results", *map(str, paths), "--out", str(tmp_path / "rows.json")])
    one, other = (f"{NAMES[0]}, changed: train.epochs={n} (seed 0)" for n in (2, 3))
    assert f"not comparable {other}: tested on other samples than {one}" in " ".join(done.output.split())
