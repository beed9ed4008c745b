"""Further evaluations from the command line: eval makes them, results takes them, reproduce trains what they need."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from command_cases import flatrock, refusal
from table_cases import TINY

import flatrock.workflows.reproduce as engine
from flatrock.core.rows import Row, read_rows

CPU = ("--device", "cpu")
MORE = "evaluate.more=[{attacks: [fgsm], eps: 0.1}, {attacks: [transfer-fgsm], surrogate: runs/digits_standard}]"
SMALL = (*TINY, "evaluate.attacks=[fgsm]")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that asks for more, and without what that is crafted on."""
    folder = tmp_path_factory.mktemp("more")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = flatrock("train", "digits_at", *SMALL, MORE, *CPU)
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is trained and evaluated, in order."""
    seen: list[str] = []
    train, evaluate = engine.train_recipe, engine.evaluate_run

    def trains(recipe: Any, **how: Any) -> Any:
        seen.append(f"train {recipe.name}")
        return train(recipe, **how)

    def evaluates(run: Any, **how: Any) -> Any:
        seen.append(f"{how['which']} {' '.join(how.get('attacks', ['own']))} {run.folder.name.partition('-')[0]}")
        return evaluate(run, **how)

    monkeypatch.setattr(engine, "train_recipe", trains)
    monkeypatch.setattr(engine, "evaluate_run", evaluates)
    return seen


def row_of(file: str, recipe: str = "digits_at") -> Row:
    (row,) = [row for row in read_rows(Path(file)) or [] if row.recipe == recipe]
    return row


def test_eval_makes_all_it_can_and_says_what_it_cannot(here: Path) -> None:
    done = flatrock("eval", "runs/digits_at", *CPU)
    said = refusal(done)
    assert "further: fgsm@0.1" in said and "further: transfer-fgsm" not in said
    assert "all is stored but for what is crafted on other runs:" in said
    assert "evaluate.more.1.surrogate: there is no run folder or checkpoint runs/digits_standard" in said
    assert "train it first: flatrock train digits_standard" in said
    names = sorted(p.name for p in Path("runs/digits_at").glob("result-*.json"))
    assert names == ["result-best-linf-0.1-fgsm-n500-seed0.json", "result-best.json"]
    told = flatrock("results", "runs/digits_at", "--out", "rows.json")
    assert "not evaluated runs/digits_at: transfer-fgsm; run `flatrock eval runs/digits_at --resume`" in " ".join(
        told.output.split()
    )
    assert "fgsm@0.1" in told.output and set(row_of("rows.json").scores["best"].figures) == {
        "clean",
        "fgsm",
        "fgsm@0.1",
    }


def test_who_asks_something_else_gets_that_alone(here: Path) -> None:
    for words in (("--limit", "50"), ("--eps", "0.05"), ("--attacks", "pgd-1"), ("--seed", "1"), ("--seeds", "0,1")):
        done = flatrock("eval", "runs/digits_at", *words, "--no-doubt", *CPU)
        assert done.exit_code == 0 and "further" not in done.output, done.output


def test_reproduce_trains_the_surrogate_first(here: Path, calls: list[str]) -> None:
    """Named, it comes first and is taken wherever it lies; the same command again does nothing."""
    Path("mine.yaml").write_text(f"base: digits_at\nevaluate: {{more: {MORE.partition('=')[2]}}}\n")
    words = ("mine.yaml", "digits_standard", *SMALL, "--runs-dir", "there", *CPU)
    plan = " ".join(flatrock("reproduce", *words, "--dry-run").output.split())
    assert "2 rows, 0 of them done" in plan
    done = flatrock("reproduce", *words)
    assert done.exit_code == 0, done.output
    assert calls == [
        "train digits_standard",
        "best own digits_standard",
        "train mine",
        "best own mine",
        "best fgsm mine",
        "best transfer-fgsm mine",
    ]
    row = row_of("there/reproduce.json", "mine")
    assert [one.where for one in row.scores["best"].more] == ["0.1", ""]
    assert row.scores["best"].more[1].provenance["surrogate"]["recipe"] == "digits_standard"
    assert "transfer-fgsm" in Path("there/reproduce.md").read_text()
    calls.clear()
    assert flatrock("reproduce", *words).exit_code == 0 and calls == []
    next(Path("there").glob("mine*/result-best-transfer*.json")).unlink()
    again = flatrock("reproduce", *words)
    assert (again.exit_code, calls) == (0, ["best transfer-fgsm mine"]), again.output
    shutil.rmtree(next(Path("there").glob("digits_standard*")))
    calls.clear()
    alone = flatrock("reproduce", "mine.yaml", *words[2:])
    assert (alone.exit_code, calls) == (0, []), "what is evaluated needs no surrogate any more"


def test_more_that_is_asked_later_is_of_the_same_run(here: Path, calls: list[str]) -> None:
    assert flatrock("reproduce", "digits_standard", *SMALL, *CPU).exit_code == 0
    calls.clear()
    done = flatrock("reproduce", "digits_standard", *SMALL, "evaluate.more=[{attacks: [fgsm], eps: 0.1}]", *CPU)
    assert (done.exit_code, calls) == (0, ["best fgsm digits_standard"]), done.output
    row = row_of("runs/reproduce.json", "digits_standard")
    assert [one.where for one in row.scores["best"].more] == ["0.1"]
    assert not any("more" in change for change in row.changes)


def test_a_surrogate_that_is_nowhere_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal(flatrock("reproduce", "digits_at", *SMALL, MORE, *CPU))
    assert "evaluate.more.1.surrogate: there is no run runs/digits_standard; name digits_standard too, it will" in said
    assert not Path("runs").exists()
    moons = MORE.replace("digits_standard", "moons_at")
    assert flatrock("train", "moons_at", "train.epochs=1", *CPU).exit_code == 0
    said = refusal(flatrock("reproduce", "digits_at", *SMALL, moons, *CPU))
    assert "evaluate.more.1.surrogate: " in said and "takes inputs (2,), not (1, 8, 8)" in said
