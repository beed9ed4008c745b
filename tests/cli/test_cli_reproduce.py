"""`flatrock reproduce`: one command makes a table; what is done is skipped, failures are shown, nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_cases import flatrock, refusal
from results_cases import fake_run
from table_cases import NAMES, TINY, lasting

import flatrock as library
import flatrock.engine.follow as steps
import flatrock.workflows.reproduce as engine
from flatrock.cli.reproduce import Told
from flatrock.core.errors import BusyError
from flatrock.core.locks import locked
from flatrock.core.rows import read_rows
from flatrock.engine.folder import RunFolder
from flatrock.workflows.reproduce_plan import Planned, plan_rows

CPU = ("--device", "cpu")
FULL = {"clean": 83.0, "pgd-20": 51.0, "cw-20": 50.5, "autoattack": 48.0}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished table. Copy it, do not change it."""
    folder = tmp_path_factory.mktemp("table")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = flatrock("reproduce", *NAMES, *TINY, *CPU)
    (folder / "output").write_text(done.output)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is trained and evaluated, in order."""
    seen: list[str] = []
    train, evaluate = engine.train_recipe, engine.evaluate_run

    def trained(recipe: Any, **how: Any) -> Any:
        seen.append(f"train {recipe.name}")
        return train(recipe, **how)

    def evaluated(run: Any, **how: Any) -> Any:
        seen.append(f"{how['which']} {run.folder.name.partition('-')[0]}")
        return evaluate(run, **how)

    monkeypatch.setattr(engine, "train_recipe", trained)
    monkeypatch.setattr(engine, "evaluate_run", evaluated)
    return seen


def tree(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in sorted(folder.rglob("*"))}


def test_rows_page_and_words(finished: Path) -> None:
    rows = read_rows(finished / "runs" / "reproduce.json") or []
    assert [(row.recipe, row.status, set(row.scores)) for row in rows] == [
        (name, "finished", {"best"}) for name in NAMES
    ]
    page = (finished / "runs" / "reproduce.md").read_text()
    assert page.splitlines()[2].startswith("Written by `flatrock reproduce digits_standard digits_at train.epochs=3 ")
    assert "| digits_at, changed |" in page and "](reproduce-other.png)" in page
    assert "## Making the rows last made again" in page
    output = (finished / "output").read_text()
    assert output.count("row 1/2 digits_standard  runs/") == output.count("row 2/2 digits_at  runs/") == 1
    assert "(about 0:0" in output.split("row 2/2")[1], "after one row it is known how long a row takes"
    assert "left if" not in output.split("row 2/2")[0]
    assert output.count("┃ recipe") == 2, "the table after each row"
    assert "papers print no difference between two of these rows" in output


def test_finished_rows_are_skipped(finished: Path, here: Path, calls: list[str]) -> None:
    shutil.copytree(finished / "runs", here / "runs")
    before = tree(here)
    done = flatrock("reproduce", *NAMES, *TINY, *CPU)
    assert done.exit_code == 0, done.output
    assert calls == []
    assert done.output.count("was done before") == 2
    changed = {name for name, time in tree(here).items() if before.get(name) != time}
    written = ("reproduce.json", "reproduce.md", "reproduce-other.png")
    assert changed <= {"runs", *(f"runs/{name}" for name in written)}
    assert lasting(here / "runs/reproduce.json") == lasting(finished / "runs/reproduce.json")
    next((here / "runs").glob("digits_at-*/result-best.json")).unlink()
    more = flatrock("reproduce", *NAMES, "digits_mart", *TINY, *CPU)
    assert more.exit_code == 0, more.output
    assert calls == ["best digits_at", "train digits_mart", "best digits_mart"]
    assert lasting(here / "runs/reproduce.json")[:2] == lasting(finished / "runs/reproduce.json")


@pytest.mark.parametrize("at", [("train", 0), ("train", 1), ("eval", 0), ("eval", 1)])
def test_interrupted_and_made_again(
    finished: Path, here: Path, monkeypatch: pytest.MonkeyPatch, at: tuple[str, int]
) -> None:
    """Ctrl-C in the middle of a run or an evaluation of the first or the second row."""
    task, advances, seen = (
        {"train": "training", "eval": "evaluating pgd-3"}[at[0]],
        {"train": 5, "eval": 2}[at[0]],
        [0, 0],
    )
    begin, advance = engine.Silent.begin, engine.Silent.advance

    def begins(self: Any, name: str, total: int, done: int = 0) -> None:
        seen[0] += name.startswith(task)
        self.here, seen[1] = name.startswith(task), 0
        begin(self, name, total, done)

    def advances_until(self: Any, units: int, note: str = "") -> None:
        seen[1] += self.here
        if seen == [at[1] + 1, advances]:
            raise KeyboardInterrupt
        advance(self, units, note)

    monkeypatch.setattr("flatrock.cli.console.TerminalProgress.begin", begins)
    monkeypatch.setattr("flatrock.cli.console.TerminalProgress.advance", advances_until)
    done = flatrock("reproduce", *NAMES, *TINY, *CPU)
    assert done.exit_code == 130
    assert "interrupted; the same command goes on where this one stopped" in done.output
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert (here / "runs/reproduce.json").exists() == (at[1] == 1), "the first row is safe"
    again = flatrock("reproduce", *NAMES, *TINY, *CPU)
    assert again.exit_code == 0, again.output
    assert "goes on" in again.output
    assert lasting(here / "runs/reproduce.json") == lasting(finished / "runs/reproduce.json")


def test_a_row_that_fails_is_shown_and_ends_no_other(finished: Path, here: Path, calls: list[str]) -> None:
    (here / "bad.yaml").write_text("base: digits_at\noptimizer: {lr: 1.0e+30}\n")
    done = flatrock("reproduce", "bad.yaml", "digits_at", *TINY, *CPU)
    assert done.exit_code == 1
    assert "FAILED: bad-" in done.output and "1 of 2 rows failed" in done.output
    assert "│ bad FAILED" in done.output
    assert calls == ["train bad", "train digits_at", "best digits_at"]
    rows = read_rows(here / "runs/reproduce.json") or []
    assert [(row.recipe, row.status) for row in rows] == [("bad", "failed"), ("digits_at", "finished")]
    assert "| bad FAILED |" in (here / "runs/reproduce.md").read_text()
    assert lasting(here / "runs/reproduce.json")[1:] == lasting(finished / "runs/reproduce.json")[1:]
    calls.clear()
    again = flatrock("reproduce", "bad.yaml", "digits_at", *TINY, *CPU)
    assert (again.exit_code, calls) == (1, [])
    assert "It failed before and is not tried again; remove runs/bad-" in again.output


def test_an_error_before_there_is_a_run_spoils_no_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: device is busy")

    monkeypatch.setattr("flatrock.workflows.train.build_job", busy)
    done = flatrock("reproduce", "digits_at", *TINY, *CPU)
    assert done.exit_code == 1 and "device is busy" in done.output
    (kept,) = (here / "runs").glob("digits_at-*/failure.txt")
    monkeypatch.undo()
    monkeypatch.chdir(here)
    again = flatrock("reproduce", "digits_at", *TINY, *CPU)
    assert again.exit_code == 0, again.output
    assert not kept.exists()


def test_a_run_that_broke_off_can_go_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = steps.train_step

    def breaks(job: Any, batch: Any, *, step: int, guard: bool) -> Any:
        if step > len(job.loader):
            raise RuntimeError("CUDA error: unspecified launch failure")
        return whole(job, batch, step=step, guard=guard)

    monkeypatch.setattr(steps, "train_step", breaks)
    assert flatrock("reproduce", "digits_at", *TINY, *CPU).exit_code == 1
    monkeypatch.undo()
    monkeypatch.chdir(here)
    again = flatrock("reproduce", "digits_at", *TINY, *CPU)
    (folder,) = (here / "runs").glob("digits_at-*")
    told = f"go on with `flatrock train runs/{folder.name} --resume` if the cause is gone, or remove"
    assert again.exit_code == 1 and told in " ".join(again.output.split())
    assert flatrock("train", f"runs/{folder.name}", "--resume", *CPU).exit_code == 0
    assert flatrock("reproduce", "digits_at", *TINY, *CPU).exit_code == 0


def test_rows_that_need_one_that_failed(here: Path) -> None:
    """The helper has nothing to give; those who do without it are made."""
    (here / "helper.yaml").write_text("base: digits_standard\noptimizer: {lr: 1.0e+30}\n")
    (here / "hat.yaml").write_text(
        "base: digits_at\nobjective: {name: hat, beta: 2.5, gamma: 0.5, reach: 2, helper: runs/helper}\n"
    )
    done = flatrock("reproduce", "hat.yaml", "digits_standard", "helper.yaml", *TINY, *CPU)
    assert done.exit_code == 1
    order = ("helper", "hat", "digits_standard")
    assert all(f"row {n}/3 {name}  runs/{name}-" in done.output for n, name in enumerate(order, 1))
    assert "FAILED: hat-" in done.output and "objective.helper: run runs/helper-" in done.output
    rows = read_rows(here / "runs/reproduce.json") or []
    assert [(row.recipe, row.status) for row in rows] == [("helper", "failed"), ("digits_standard", "finished")]


def test_faults_are_told_before_any_work(here: Path) -> None:
    text = refusal(flatrock("reproduce", "digits_att", "digits_hat", "cifar10_short_at", "seed=-1"))
    assert "did you mean 'digits_at'?" in text
    assert "digits_hat, cifar10_short_at: seed: got -1" in text
    text = refusal(flatrock("reproduce", "digits_hat", "cifar10_short_at"))
    assert "name digits_standard too, it will come first" in text and "cifar10 not found in data" in text
    assert "unknown device 'tpu'" in refusal(flatrock("reproduce", "digits_at", "--device", "tpu"))
    assert "must end in .json" in refusal(flatrock("reproduce", "digits_at", "--out", "a.txt"))
    assert "page: a.txt must end in .md" in refusal(flatrock("reproduce", "digits_at", "--page", "a.txt"))
    assert "no recipe is named" in refusal(flatrock("reproduce", "train.epochs=1"))
    assert "no file of the papers' figures" in refusal(flatrock("reproduce", "digits_at", "--papers", "x.yaml"))
    assert tree(here) == {}
    (here / "old.json").write_text('{"schema": "flatrock.results/0", "rows": []}')
    (here / "mine.json").write_text("{}")
    assert "expected 'flatrock.results/1'" in refusal(flatrock("reproduce", "digits_at", "--out", "old.json"))
    assert "exists and is no results file" in refusal(flatrock("reproduce", "digits_at", "--out", "mine.json"))
    (here / "notes.md").write_text("# My own notes\n")
    refused = refusal(flatrock("reproduce", "digits_at", "--page", "notes.md"))
    assert "notes.md is no page that flatrock wrote, and is left alone" in refused
    assert set(tree(here)) == {"old.json", "mine.json", "notes.md"}


def test_what_is_not_alike_has_rows_of_its_own(here: Path) -> None:
    """Recipes of one's own by their hash, others by what was changed: weights, attacks, and what they begin with."""
    (here / "my.yaml").write_text("base: digits_standard\n")
    for words in (("my.yaml",), ("my.yaml", "optimizer.lr=0.3"), ("digits_standard", "evaluate.attacks=[fgsm]")):
        done = flatrock("reproduce", *TINY, *words, *CPU)
        assert done.exit_code == 0, done.output
    rows = read_rows(here / "runs/reproduce.json") or []
    assert [(row.recipe, row.own) for row in rows] == [("my", True), ("my", True), ("digits_standard", False)]
    assert rows[0].recipe_hash != rows[1].recipe_hash
    assert any(change.startswith("evaluate.attacks: ['fgsm'] instead of") for change in rows[2].changes)
    assert "--page" not in (here / "runs/reproduce.md").read_text()


def test_any_error_of_a_row_ends_that_row_alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = engine.evaluate_run

    def out_of_memory(run: Any, **how: Any) -> Any:
        if "standard" in run.folder.name:
            raise RuntimeError("no memory left")
        return evaluate(run, **how)

    monkeypatch.setattr(engine, "evaluate_run", out_of_memory)
    done = flatrock("reproduce", *NAMES, *TINY, *CPU)
    assert done.exit_code == 1
    (place,) = (here / "runs").glob("digits_standard-*/failure.txt")
    assert "no memory left" in place.read_text() and "out_of_memory" in place.read_text()
    assert f"(where: {place.relative_to(here)})" in done.output.replace("\n", "")
    rows = read_rows(here / "runs/reproduce.json") or []
    assert [(row.recipe, len(row.scores)) for row in rows] == [(NAMES[0], 0), (NAMES[1], 1)]


def test_a_plan_writes_nothing(finished: Path, here: Path) -> None:
    done = flatrock("reproduce", "digits_at", "digits_hat", "digits_standard", *TINY, "--dry-run", *CPU)
    assert done.exit_code == 0, done.output
    assert tree(here) == {}
    assert done.output.count("train, best") == 3
    assert "3 rows, 0 of them done; results in runs/reproduce.json" in done.output
    assert "of training on cpu" in done.output
    shutil.copytree(finished / "runs", here / "runs")
    before = tree(here)
    done = flatrock("reproduce", *NAMES, "digits_mart", *TINY, "--dry-run", *CPU)
    assert "3 rows, 2 of them done" in done.output
    assert done.output.count("train, best") == 1
    assert tree(here) == before


def test_no_time_is_left(here: Path, calls: list[str]) -> None:
    done = flatrock("reproduce", *NAMES, *TINY, "--limit-minutes", "0", *CPU)
    assert (done.exit_code, calls, tree(here)) == (3, [], {})
    assert done.output.count("not made ") == 2


def test_time_ends_between_parts(finished: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the training of the second row: what is there counts, and the next time goes on from it."""
    asked: list[int] = []
    monkeypatch.setattr(engine.Means, "late", property(lambda means: asked.append(1) or len(asked) > 3))
    done = flatrock("reproduce", *NAMES, *TINY, "--limit-minutes", "9", *CPU)
    assert done.exit_code == 3, done.output
    assert [row.recipe for row in read_rows(here / "runs/reproduce.json") or []] == ["digits_standard"]
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert next((here / "runs").glob("digits_at-*/last.safetensors")).exists()
    again = flatrock("reproduce", *NAMES, *TINY, *CPU)
    assert again.exit_code == 0, again.output
    assert lasting(here / "runs/reproduce.json") == lasting(finished / "runs/reproduce.json")


def test_a_row_has_one_who_makes_it(finished: Path, here: Path, calls: list[str]) -> None:
    """From the look at what there is to the last evaluation: nobody trains anew what another has just finished."""
    shutil.copytree(finished / "runs", here / "runs")
    (plain,) = (here / "runs").glob(f"{NAMES[0]}-*")
    shutil.rmtree(plain)
    with locked(plain.with_name(f".{plain.name}.lock"), "making", plain):
        done = flatrock("reproduce", *NAMES, *TINY, *CPU)
    assert (done.exit_code, calls) == (3, [])
    assert f"process {os.getpid()} is making runs/{plain.name}" in done.output.replace("\n", "")


def test_other_attacks_are_made_of_the_same_weights(here: Path, calls: list[str]) -> None:
    def made(attacks: str) -> Any:
        settings = "data: {limit: 512}, train: {epochs: 3, batch_size: 32, tensorboard: false}, select: {size: 40}"
        Path("mine.yaml").write_text(f"{{base: digits_standard, {settings}, evaluate: {{attacks: [{attacks}]}}}}")
        done = flatrock("reproduce", "mine.yaml", *CPU)
        assert done.exit_code == 0, done.output
        (row,) = read_rows(here / "runs/reproduce.json") or []
        return row.scores["best"].right.keys()

    assert made("fgsm") == {"clean", "fgsm"}
    assert made("fgsm, pgd-2") == {"clean", "fgsm", "pgd-2"}
    assert made("fgsm") == {"clean", "fgsm", "pgd-2"}, "more than asked for is there"
    assert calls == ["train mine", "best mine", "best mine"]
    # An evaluation that was stopped with other attacks is not left without a way to go on.
    before = (here / "runs/mine/recipe.yaml").read_text()
    (here / "runs/mine/result-best.json").unlink()
    (here / "runs/mine/result-best.part").mkdir()
    for name in ("exam.json", "chunk-000000.safetensors"):
        (here / "runs/mine/result-best.part" / name).write_text("{}")
    Path("mine.yaml").write_text(Path("mine.yaml").read_text().replace("[fgsm]", "[pgd-3]"))
    done = flatrock("reproduce", "mine.yaml", *CPU)
    assert done.exit_code == 1
    assert "`flatrock eval runs/mine --which best --resume`, or delete it" in " ".join(done.output.split())
    assert (here / "runs/mine/recipe.yaml").read_text() == before
    # One that was killed before its first batch is none.
    (here / "runs/mine/result-best.part/chunk-000000.safetensors").unlink()
    assert made("pgd-3") == {"clean", "pgd-3"}


def test_rows_that_another_process_makes_are_left(finished: Path, here: Path, calls: list[str]) -> None:
    """While it trains one, and while it evaluates one; so is what needs a run that it trains."""
    shutil.copytree(finished / "runs", here / "runs")
    (plain,), (at,) = (list((here / "runs").glob(f"{name}-*")) for name in NAMES)
    (at / "result-best.json").unlink()
    shutil.rmtree(plain)
    plain.mkdir()
    with RunFolder(plain).locked(), RunFolder(at).locked("evaluating"):
        done = flatrock("reproduce", *NAMES, "digits_hat", "digits_mart", *TINY, *CPU)
    assert done.exit_code == 3, done.output
    assert calls == ["train digits_standard", "train digits_mart", "best digits_mart"], "one was asked for in vain"
    told = done.output.replace("\n", "")
    assert f"{plain.name}: process {os.getpid()} is training into runs/{plain.name}; wait for it" in told
    assert f"{at.name}: process {os.getpid()} is evaluating runs/{at.name}; wait for it" in told
    assert f"it needs runs/{plain.name}, into which another process is training" in told
    assert "FAILED" not in told and "rows failed" not in told and told.count("not made ") == 3
    assert not list((here / "runs").glob("*/failure.txt"))
    assert [row.recipe for row in read_rows(here / "runs/reproduce.json") or []] == [*NAMES, "digits_mart"]
    again = flatrock("reproduce", *NAMES, *TINY, *CPU)
    assert again.exit_code == 0, again.output
    rows = {row["recipe"]: row for row in lasting(here / "runs/reproduce.json")}
    assert [rows[name] for name in NAMES] == lasting(finished / "runs/reproduce.json")


def test_other_rows_of_the_file_are_kept(finished: Path, here: Path) -> None:
    shutil.copytree(finished / "runs", here / "runs")
    other = fake_run(here / "fake", "digits_mart", FULL)
    assert flatrock("results", other, "--add", "--out", "runs/reproduce.json").exit_code == 0
    done = flatrock("reproduce", "digits_at", *TINY, *CPU)
    assert done.exit_code == 0, done.output
    rows = read_rows(here / "runs/reproduce.json") or []
    assert [row.recipe for row in rows] == ["digits_standard", "digits_mart", "digits_at"]
    assert "digits_mart" in (here / "runs/reproduce.md").read_text()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_results_file_that_another_process_holds_gets_its_rows_later(
    finished: Path, here: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """With the next row, or in the end; nothing is lost silently if it is held even then."""
    shutil.copytree(finished / "runs", here / "runs")
    (here / "runs/reproduce.json").unlink()
    add, held = engine.add_rows, [True] * times

    def added(path: Path, rows: Any) -> Any:
        if held:
            held.pop()
            raise BusyError("process 1 is adding rows to it; wait for it")
        return add(path, rows)

    monkeypatch.setattr(engine, "add_rows", added)
    done = flatrock("reproduce", *NAMES, *TINY, *CPU)
    if times < 3:  # after each of two rows, and once more
        assert done.exit_code == 0, done.output
        assert lasting(here / "runs/reproduce.json") == lasting(finished / "runs/reproduce.json")
    else:
        assert done.exit_code == 2 and "is adding rows to it; wait for it" in done.output


def test_what_became_of_the_papers_differences(here: Path) -> None:
    """Of runs that are finished: nothing is trained, and no data are needed."""
    last = {**FULL, "pgd-20": 44.0}
    fake_run(here / "runs", "cifar10_full_at", FULL, last=last)
    fake_run(here / "runs", "cifar10_full_at_awp", {**FULL, "pgd-20": 54.0}, last={**FULL, "pgd-20": 53.0})
    done = flatrock("reproduce", "cifar10_full_*", *CPU)
    assert done.exit_code == 0, done.output
    assert "of the differences papers print, cifar10_full:" in done.output
    assert "reproduced (AT, last epoch minus best: PGD-20; AT + AWP minus AT: PGD-20; " in done.output
    assert done.output.endswith("PASS: 2 of 2 rows as their recipes expect\n"), "the last epoch is not asked"
    again = flatrock("reproduce", "cifar10_full_at_awp", *CPU)
    assert "AT + AWP minus AT: PGD-20; " in again.output, "the other row is in the file"
    assert all(f"wrote runs/reproduce{end}" in again.output for end in (".json", ".md", ".png", "-cifar10_full.png"))
    page = (here / "runs/reproduce.md").read_text()
    assert "AWP (Wu et al. 2020) Table 3" in page and "](reproduce-cifar10_full.png)" in page
    assert "cifar10_short" not in page, "nothing of protocols nobody asked for"
    (here / "runs/cifar10_full_at/result-last.json").unlink()
    assert "cifar10 not found" in refusal(flatrock("reproduce", "cifar10_full_*", *CPU)), "the last epoch is missing"


def test_seeds(here: Path) -> None:
    done = flatrock("reproduce", "digits_standard", *TINY, "--seeds", "0,3", *CPU)
    assert done.exit_code == 0, done.output
    rows = read_rows(here / "runs/reproduce.json") or []
    assert [row.seed for row in rows] == [0, 3]
    assert sorted(p.name.rpartition("-")[2] for p in (here / "runs").glob("digits_*")) == ["seed0", "seed3"]
    assert "digits_standard, seed 3" in done.output
    assert "--seeds 0,3`" in (here / "runs/reproduce.md").read_text()


def test_from_python(finished: Path, here: Path) -> None:
    keys = {"epochs": 3, "batch_size": 64, "tensorboard": False, "save_seconds": 0.001}
    more = {"data__limit": 512, "select__size": 40, "evaluate": {"attacks": ["fgsm", "pgd-3"], "batch_size": 100}}
    outcome = library.reproduce("digits_at", runs_dir=here / "r", device="cpu", train=keys, **more)
    assert (outcome.problems, outcome.left, len(outcome.rows)) == ({}, [], 1)
    assert lasting(here / "r/reproduce.json") == lasting(finished / "runs/reproduce.json")[1:]
    names = [p.name for p in (here / "r").iterdir() if p.is_dir()]
    assert names == [p.name for p in (finished / "runs").glob("digits_at*")]
    assert "train.epochs=3" in (here / "r/reproduce.md").read_text().splitlines()[2]
    assert json.loads((here / "r/reproduce.json").read_text())["schema"] == "flatrock.results/1"


def test_the_time_left_is_that_of_rows_made_here(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that were begun before, or failed, say nothing about how long a row takes."""
    plan = plan_rows(["digits_at", "digits_mart", "digits_alp"])
    told = Told(plan)

    def turn(number: int, planned: Planned, fails: bool = False) -> str:
        told.row(number, planned, planned.left())
        if fails:
            told.failed(planned, "no reason")
        told.added(planned, [])
        return capsys.readouterr().out

    assert "left" not in turn(1, plan[0], fails=True)
    assert "left" not in turn(2, plan[1])
    assert "(about 0:00:00 left if rows take as long as so far)" in turn(3, plan[2])
