"""`flatrock sweep`: every setting and seed is a run; what is done is skipped, processes share, one table at the end."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from command_cases import Done, flatrock, refusal

import flatrock as library
import flatrock.workflows.reproduce as engine
from flatrock.core.gaps import mean_paired
from flatrock.core.locks import is_held, locked
from flatrock.core.records import read_result
from flatrock.engine.folder import RunFolder
from flatrock.reports.claims import points
from flatrock.workflows.folders import making

TINY = ("data.limit=512", "train.batch_size=64", "select.size=40", "train.tensorboard=false")
TINY += ("evaluate.attacks=[fgsm,pgd-3]", "evaluate.batch_size=100")
# lr 1e30 fails at its first step.
WORDS = ("sweep", "digits_standard", "optimizer.lr=0.2,1e30", "train.epochs=3", *TINY, "--device", "cpu")
ALL = (*WORDS, "--seeds", "0-1", "--runs-dir", "runs/s")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished sweep. Copy it, do not change it."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = flatrock(*ALL)
    (folder / "output").write_text(done.output)
    assert done.exit_code == 1, done.output
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def again(finished: Path, here: Path) -> Path:
    """A copy of the finished sweep, as the current folder."""
    shutil.copytree(finished / "runs", here / "runs")
    return here


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is trained and evaluated, in order."""
    seen: list[str] = []
    train, evaluate = engine.train_recipe, engine.evaluate_run
    monkeypatch.setattr(
        engine, "train_recipe", lambda recipe, **how: seen.append(f"train {how['folder'].name}") or train(recipe, **how)
    )
    monkeypatch.setattr(
        engine, "evaluate_run", lambda run, **how: seen.append(f"eval {run.folder.name}") or evaluate(run, **how)
    )
    return seen


MINUS = "each setting minus the first"


def lines(done: Done | str, *, differences: bool = False) -> list[list[str]]:
    """The table of the settings, or that of their differences."""
    text = (done if isinstance(done, str) else done.output).partition(MINUS)[2 if differences else 0]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


GOOD = ["optimizer.lr=0.2-seed0", "optimizer.lr=0.2-seed1"]


def test_table_and_words(finished: Path) -> None:
    """Means and deviations are those of the result files; the failed setting is a line that says so."""
    output = (finished / "output").read_text()
    assert "4 runs in runs/s: 2 settings x 2 seeds; 0 done" in output
    assert "of training on cpu" in output and "from passes of one batch of 2 settings" in output
    good, bad = lines(output)
    results = [read_result(finished / "runs" / "s" / name / "result-best.json") for name in GOOD]
    columns = [[r.clean for r in results], *([r.per_attack[a] for r in results] for a in ("fgsm", "pgd-3"))]
    columns.append([r.robust for r in results])
    shown = [f"{100 * mean(column):.2f} ± {100 * stdev(column):.2f}" for column in columns]
    assert good == ["0.2", "2", *shown]
    assert bad == ["1.0e+30", "0 of 2, 2 FAILED", "", "", "", ""]
    assert "mean ± standard deviation over seeds; epochs chosen on held-out data" in output
    assert "FAILED 2 of 4 runs: optimizer.lr=1.0e+30-seed0, optimizer.lr=1.0e+30-seed1" in output


def test_csv_has_a_line_for_every_run(finished: Path) -> None:
    with (finished / "runs" / "s" / "sweep.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["optimizer.lr"], row["seed"], row["status"]) for row in table] == [
        ("0.2", "0", "finished"),
        ("0.2", "1", "finished"),
        ("1e+30", "0", "failed"),
        ("1e+30", "1", "failed"),
    ]
    assert table[0]["clean"] and not table[2]["clean"]


def test_what_is_done_is_skipped_and_the_rest_goes_on(again: Path, calls: list[str]) -> None:
    runs = again / "runs" / "s"
    shutil.rmtree(runs / GOOD[0])
    (runs / GOOD[1] / "result-best.json").unlink()
    done = flatrock(*ALL)
    assert calls == [f"train {GOOD[0]}", f"eval {GOOD[0]}", f"eval {GOOD[1]}"]
    assert done.exit_code == 1 and "4 runs in runs/s: 2 settings x 2 seeds; 0 done, 2 failed" in done.output
    calls.clear()
    last = flatrock(*ALL)
    assert calls == [] and lines(last)[0][1] == "2"


def test_an_interrupted_run_goes_on(here: Path, monkeypatch: pytest.MonkeyPatch, finished: Path) -> None:
    words = ("sweep", "digits_standard", "optimizer.lr=0.2,0.3", "train.epochs=3", *TINY, "--device", "cpu")
    advance = "flatrock.cli.sweep.TerminalProgress.advance"
    counted: list[int] = []

    def stop(*more: object) -> None:
        counted.append(1)
        if len(counted) == 12:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(advance, stop)
        stopped = flatrock(*words, "--runs-dir", "runs/s")
    assert stopped.exit_code == 130 and "the same command goes on where this one stopped" in stopped.output
    assert RunFolder(Path("runs/s/optimizer.lr=0.2-seed0")).unfinished() == "interrupted: Ctrl-C"
    done = flatrock(*words, "--runs-dir", "runs/s")
    assert done.exit_code == 0, done.output
    assert len(RunFolder(Path("runs/s/optimizer.lr=0.2-seed0")).resumptions()) == 1
    weights = [folder / "best.safetensors" for folder in (Path("runs/s") / GOOD[0], finished / "runs" / "s" / GOOD[0])]
    same = [library.load(file).state_dict() for file in weights]
    assert all(bool((a == same[1][name]).all()) for name, a in same[0].items()), "as if never interrupted"


def test_dry_run_writes_nothing(here: Path) -> None:
    done = flatrock(*ALL, "--dry-run")
    assert done.exit_code == 0, done.output
    assert [row[1:] for row in lines(done)] == [["new", "train, best"]] * 4
    assert list(here.iterdir()) == []


def test_dry_run_of_what_is_there(again: Path) -> None:
    done = flatrock(*ALL, "--dry-run")
    assert [row[2] for row in lines(done)] == ["done", "done", "FAILED", "FAILED"]
    assert "2 done, 2 failed" in done.output and "about" not in done.output


def test_other_overrides_are_another_sweep(again: Path, calls: list[str]) -> None:
    said = refusal(flatrock(*ALL, "optimizer.momentum=0.5"))
    assert "is a run of another recipe: optimizer.momentum: " in said
    assert "remove it, or choose another place with --runs-dir" in said and calls == []


def test_faults_of_all_points_are_told_before_any_is_trained(here: Path) -> None:
    said = refusal(
        flatrock("sweep", "digits_standard", "optimizer.lr=0.1,-3", "model.name=digits_cnn,digit_cnn", *TINY)
    )
    assert "nothing was begun:" in said and "digit_cnn" in said and "optimizer.lr" in said
    assert list(here.iterdir()) == []


def test_faults_of_options_words_and_settings_are_told_at_once(here: Path) -> None:
    words = ("optimizer.lr=0.1,x", "optimizer.momentom=0.9", "objective.name=at,tradess", "a=1,,2", "train.epochs")
    said = refusal(flatrock("sweep", "digits_at", *words, "--seeds", "a", "--shard", "3/2"))
    for fault in ("seeds must be", "shard must be", "momentom", "tradess", "optimizer.lr", "a=1,,2", "key=value"):
        assert fault in said, said
    assert "nothing is swept" not in refusal(flatrock("sweep", "digits_at", "--seeds", "a"))
    assert list(here.iterdir()) == []


def test_a_run_that_another_process_makes_is_left(again: Path, calls: list[str]) -> None:
    place = Path("runs/s") / GOOD[0]
    shutil.rmtree(place)
    words = [word.replace("0.2,1e30", "0.2,0.3") for word in ALL]
    with making(place):
        done = flatrock(*words)
    assert done.exit_code == 3, done.output
    assert f"not made {GOOD[0]}: process {os.getpid()} is making {place}" in done.output
    assert calls == [f"{what} optimizer.lr=0.3-seed{i}" for i in (0, 1) for what in ("train", "eval")]
    assert [row[1] for row in lines(done)] == ["1 of 2", "2"]


def test_processes_write_the_table_in_turn(again: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They often end together, and what one has half written another would move away."""
    import flatrock.workflows.sweep as module

    held: list[bool | None] = []
    write = module.write_csv
    monkeypatch.setattr(
        module, "write_csv", lambda *told: held.append(is_held(Path("runs/s/.sweep.csv.lock"))) or write(*told)
    )
    assert flatrock(*ALL).exit_code == 1
    assert held == [True] and not Path("runs/s/.sweep.csv.lock").exists()


TWO = [word.replace("0.2,1e30", "0.2,0.3") for word in ALL]


def test_a_table_that_another_process_writes_for_long_is_left_to_it(
    again: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs are made: the tables are printed, and nothing has failed."""
    monkeypatch.setattr("flatrock.core.locks.WAIT", 0.1)
    free = flatrock(*ALL)
    with locked(Path("runs/s/.sweep.csv.lock"), "writing", Path("runs/s/sweep.csv")):
        done = flatrock(*ALL)
    assert done.exit_code == free.exit_code, done.output
    assert lines(done) == lines(free)
    assert f"process {os.getpid()} is writing runs/s/sweep.csv" in done.output
    assert "the same command writes it again" in done.output


@pytest.fixture
def other(finished: Path, again: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Holds the lock of a run that is not there. It is let go, and what else it is given happens, when a run of
    another setting has been trained here."""
    shutil.rmtree(Path("runs/s") / GOOD[0])
    train = engine.train_recipe
    with ExitStack() as held:
        held.enter_context(making(Path("runs/s") / GOOD[0]))

        def trained(recipe: Any, **how: Any) -> Any:
            if how["folder"].name != GOOD[0]:
                held.close()
            return train(recipe, **how)

        monkeypatch.setattr(engine, "train_recipe", trained)
        yield held


def test_what_another_process_has_made_in_the_end_is_not_left(finished: Path, other: ExitStack) -> None:
    there = Path("runs/s") / GOOD[0]
    other.callback(shutil.copytree, finished / "runs" / "s" / GOOD[0], there)
    done = flatrock(*TWO)
    assert done.exit_code == 0, done.output
    assert "not made" not in done.output and f"{there}, made by another process meanwhile" in done.output
    assert [row[1] for row in lines(done)] == ["2", "2"]


def test_what_a_killed_process_was_making_is_made_in_the_end(other: ExitStack) -> None:
    done = flatrock(*TWO)
    assert done.exit_code == 0, done.output
    assert [row[1] for row in lines(done)] == ["2", "2"]
    assert RunFolder(Path("runs/s") / GOOD[0]).run().status == "finished"
    first = done.output.index(f"left {GOOD[0]}")
    assert done.output.index(f"wrote runs/s/{GOOD[0]}/result-best.json") > first


def test_time_holds_for_what_a_killed_process_was_making(other: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    over: list[bool] = []
    other.callback(over.append, True)
    monkeypatch.setattr(engine.Means, "late", property(lambda means: bool(over)))
    done = flatrock(*TWO, "--limit-minutes", "9")
    assert done.exit_code == 3, done.output
    assert f"not made {GOOD[0]}: no time was left" in done.output, "nobody is making it"


def test_no_time_is_left(here: Path) -> None:
    done = flatrock(*ALL, "--limit-minutes", "0")
    assert done.exit_code == 3, done.output
    assert done.output.count("no time was left; the same command goes on") == 4
    assert [row[1] for row in lines(done)] == ["0 of 2", "0 of 2"]


def test_differences_from_the_first_setting(again: Path) -> None:
    """Paired by seed and by sample, in the words of the command and as values of the call."""
    done = flatrock(*TWO)
    assert done.exit_code == 0, done.output
    flags = {
        lr: [read_result(Path(f"runs/s/optimizer.lr={lr}-seed{seed}/result-best.json")).flags for seed in (0, 1)]
        for lr in ("0.2", "0.3")
    }
    gap = mean_paired([(flags["0.3"][seed]["fgsm"], flags["0.2"][seed]["fgsm"]) for seed in (0, 1)])
    table = lines(done, differences=True)
    assert [row[:2] for row in table] == [["0.3", "seed 0"], ["0.3", "seed 1"], ["0.3", "mean of 2"]]
    assert table[-1][3] == points(gap) + " !" * gap.beyond_chance
    assert f"{MINUS} (optimizer.lr=0.2): points of test accuracy, paired by seed and test sample" in done.output
    assert "of a seed alone" not in done.output
    alone = flatrock(*TWO[:-4], "--runs-dir", "runs/s")
    assert lines(alone, differences=True)[0][1] == "seed 0 alone"
    assert "of a seed alone, ± is the chance of the test set" in alone.output
    tiny: dict[str, Any] = {"data": {"limit": 512}, "select": {"size": 40}, "train": {"batch_size": 64, "epochs": 3}}
    tiny |= {"train__tensorboard": False, "evaluate": {"attacks": ["fgsm", "pgd-3"], "batch_size": 100}}
    (found,) = library.sweep(
        "digits_standard", {"optimizer.lr": [0.2, 0.3]}, seeds=[0, 1], runs_dir="runs/s", device="cpu", **tiny
    ).differences
    assert (found.base, found.values, found.seeds) == ({"optimizer.lr": "0.2"}, {"optimizer.lr": "0.3"}, (0, 1))
    assert found.gaps["fgsm"] == gap and len(found.by_seed["fgsm"]) == 2


def test_runs_on_data_that_was_exchanged_are_named(again: Path) -> None:
    assert "not comparable" not in flatrock(*TWO).output
    file = Path("runs/s/optimizer.lr=0.3-seed1/result-best.json")
    result = read_result(file)
    file.write_text(replace(result, provenance={**result.provenance, "samples_digest": "exchanged"}).to_json())
    done = flatrock(*TWO)
    said = "not comparable optimizer.lr=0.3-seed1: tested on other samples than optimizer.lr=0.2-seed0, though"
    assert done.exit_code == 0 and said in " ".join(done.output.split()), done.output


def test_a_setting_without_runs_has_no_differences(finished: Path) -> None:
    assert MINUS not in (finished / "output").read_text(), "the other setting failed"


def test_shards_make_the_whole_together(here: Path, calls: list[str]) -> None:
    words = [word.replace("0.2,1e30", "0.2,0.3") for word in ALL]
    first = flatrock(*words, "--shard", "1/2")
    assert first.exit_code == 0, first.output
    assert calls == [f"{what} optimizer.lr={lr}-seed0" for lr in (0.2, 0.3) for what in ("train", "eval")]
    assert "2 settings x 2 seeds, 2 of them in this shard" in first.output
    assert [row[1] for row in lines(first)] == ["1 of 2", "1 of 2"]
    second = flatrock(*words, "--shard", "2/2")
    assert second.exit_code == 0 and [row[1] for row in lines(second)] == ["2", "2"]
    assert "shard must be i/n" in refusal(flatrock(*words, "--shard", "0/2"))


def test_two_processes_share_a_sweep(here: Path) -> None:
    words = [word.replace("0.2,1e30", "0.2,0.3") for word in ALL]
    begin = [sys.executable, "-m", "flatrock", *words]
    both = [subprocess.Popen(begin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in both]
    codes = {process.returncode for process in both}
    assert 0 in codes and codes <= {0, 3}, said  # whose last run ends last sees that all are there
    runs = [RunFolder(path) for path in sorted(Path("runs/s").glob("optimizer*"))]
    assert [folder.run().status for folder in runs] == ["finished"] * 4
    assert [len(folder.resumptions()) for folder in runs] == [0] * 4, "each was trained by one of them"
    last = flatrock(*words)
    assert last.exit_code == 0 and [row[1] for row in lines(last)] == ["2", "2"]


def test_a_place_that_cannot_be_written(here: Path) -> None:
    Path("file").write_text("")
    assert "cannot write" in refusal(flatrock(*WORDS, "--runs-dir", "file/x"))
    assert "must end in .csv" in refusal(flatrock(*WORDS, "--csv", "a.txt"))


def test_as_a_call(here: Path, finished: Path) -> None:
    tiny: dict[str, Any] = {"data": {"limit": 512}, "select": {"size": 40}, "train": {"batch_size": 64, "epochs": 3}}
    tiny |= {"train__tensorboard": False, "evaluate": {"attacks": ["fgsm", "pgd-3"], "batch_size": 100}}
    swept = library.sweep(
        "digits_standard", {"optimizer.lr": (0.2, 1e30)}, seeds=range(2), runs_dir="runs/s", device="cpu", **tiny
    )
    assert [(one.values["optimizer.lr"], len(one.rows), len(one.failed), one.wanted) for one in swept.settings] == [
        ("0.2", 2, 0, 2),
        ("1.0e+30", 0, 2, 2),
    ]
    assert len(swept.rows) == 4 and len(swept.problems) == 2 and not swept.left
    assert swept.csv == Path("runs/s/sweep.csv") and swept.csv.is_file()
    row = swept.settings[0].rows[0]
    stored = read_result(finished / "runs" / "s" / GOOD[0] / "result-best.json")
    assert row.scores["best"].accuracy == {"clean": stored.clean, **stored.per_attack}
