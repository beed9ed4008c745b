"""`flatrock status`: a line for every run, whatever became of it, read from small files."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_cases import flatrock, refusal
from interrupted import Ends

import flatrock as library
from flatrock.core.headers import read_header
from flatrock.core.records import Finding, Result
from flatrock.core.runs import EpochRecord
from flatrock.engine.folder import RunFolder
from flatrock.workflows.status import find_runs, standing

TINY: dict[str, Any] = {"train__epochs": 3, "data__limit": 512, "train__batch_size": 64, "select__size": 40}
TINY |= {"train__tensorboard": False, "device": "cpu"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, evaluated, and an interrupted one. Copy them, do not change them."""
    folder = tmp_path_factory.mktemp("status")
    library.train("digits_standard", folder=folder / "done", **TINY)
    evaluated = ("--attacks", "fgsm,pgd-2", "--limit", "60", "--no-doubt", "--device", "cpu")
    assert flatrock("eval", folder / "done", *evaluated).exit_code == 0
    with pytest.raises(KeyboardInterrupt):
        library.train("digits_standard", folder=folder / "stopped", progress=Ends(12, KeyboardInterrupt), **TINY)
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "runs"))


def lines(*words: str | Path) -> dict[str, list[str]]:
    """The cells of each line of the table, by the name of the run."""
    done = flatrock("status", *words)
    assert done.exit_code == 0, done.output
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.output.splitlines() if "│" in line]
    return {Path(row[0]).name: row for row in cells}


def test_a_line_for_each(runs: Path) -> None:
    shutil.copytree(runs / "stopped", runs / "deep" / "er" / "killed")
    RunFolder(runs / "deep" / "er" / "killed").write_info(status="running", reason="")
    shutil.copytree(runs / "stopped", runs / "failed")
    RunFolder(runs / "failed").write_info(status="failed", reason="a loss was not finite")
    shutil.copytree(runs / "done", runs / "cut")
    RunFolder(runs / "cut").write_info(status="truncated")
    found = lines(runs)
    status = {name: row[1] for name, row in found.items()}
    assert status == {
        "done": "finished",
        "cut": "truncated",
        "failed": "FAILED",
        "killed": "killed",
        "stopped": "interrupted",
    }
    best = RunFolder(runs / "done").run().best
    assert best is not None and best.clean is not None and best.robust is not None
    assert found["done"][2:6] == ["3/3", f"{100 * best.clean:.2f}", f"{100 * best.robust:.2f}", ""]
    head = read_header(next((runs / "done").glob("result-*.json")))
    assert found["done"][6] == f"fgsm, pgd-2; worst case {100 * head.robust:.2f} of {head.n} at eps 0.2"
    assert found["stopped"][2] == "1/3" and found["stopped"][6] == ""
    said = flatrock("status", runs).output
    assert "5 runs: " in said and "1 killed" in said
    assert (
        f"failed {runs / 'failed'}: a loss was not finite" in said and f"interrupted {runs / 'stopped'}: Ctrl-C" in said
    )


def test_one_that_is_trained_now_has_an_eta(runs: Path) -> None:
    folder = RunFolder(runs / "stopped")
    folder.write_info(status="running", reason="")
    with folder.locked():
        now = standing(folder.path)
        assert now.status == "running now" and now.epoch == 1 and now.epochs == 3
        elapsed = folder.records()[0].elapsed
        assert elapsed is not None and now.eta is not None and 0 <= now.eta <= 2 * elapsed
    assert standing(folder.path).status == "killed" and standing(folder.path).eta is None


def test_the_eta_follows_from_the_records(runs: Path) -> None:
    """Epochs of 100 s after a slow first one: 100 s to go for each that is left, less what of it has passed."""
    folder = RunFolder(runs / "stopped")
    folder.write_info(status="running", reason="")
    first = folder.records()[0]
    folder.rewrite([replace(first, epoch=i, step=8 * i, elapsed=1000.0 + 100 * i, best_epoch=1) for i in (1, 2)])
    with folder.locked():
        assert standing(folder.path).eta == pytest.approx(100, abs=5)
    recipe = folder.recipe.read_text()
    folder.recipe.write_text(recipe.replace("max_steps: null", "max_steps: 17").replace("epochs: 3", "epochs: 300"))
    with folder.locked():
        now = standing(folder.path)
    assert now.epochs == 3, "17 steps of 8 in an epoch"


@pytest.mark.parametrize(("late", "eta"), [(3600, 0), (-3600, 100)])
def test_a_clock_that_is_wrong_moves_an_eta_by_an_epoch_at_most(runs: Path, late: int, eta: float) -> None:
    """The file may be of another machine."""
    folder = RunFolder(runs / "stopped")
    folder.write_info(status="running", reason="")
    first = folder.records()[0]
    folder.rewrite([replace(first, epoch=i, step=8 * i, elapsed=1000.0 + 100 * i, best_epoch=1) for i in (1, 2)])
    os.utime(folder.metrics, (time.time() - late,) * 2)
    with folder.locked():
        assert standing(folder.path).eta == pytest.approx(eta)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("run.json", "{", "is damaged"),
        ("metrics.jsonl", "nonsense\n", "metrics.jsonl, line 1 is damaged"),
        ("metrics.jsonl", b"\xff\xfe\n", "codec can't decode"),
        ("result-best.json", '{"schema": "flatrock.result/2"}', "result-best.json is not a flatrock result"),
    ],
)
def test_a_damaged_run_is_a_line_and_no_end(runs: Path, file: str, content: str | bytes, told: str) -> None:
    (runs / "done" / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    found = lines(runs)
    assert found["done"][1] == "DAMAGED" and found["stopped"][1] == "interrupted"
    said = flatrock("status", runs).output
    assert f"damaged {runs / 'done'}: " in said and told in said


def test_lost_epochs_and_a_line_that_is_just_written(runs: Path) -> None:
    metrics = runs / "done" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + '{"epoch": 4, "st')
    assert standing(runs / "done").epoch == 3 and standing(runs / "done").status == "finished"
    metrics.write_text("\n".join(whole.splitlines()[1:]) + "\n")
    lost = standing(runs / "done")
    assert lost.status == "damaged" and "has lost epochs" in lost.why
    for left in ("", *(whole.splitlines(keepends=True)[0],)):
        metrics.write_text(left)
        lost = standing(runs / "done")
        assert lost.status == "damaged" and "`train --resume` rebuilds it" in lost.why and not lost.stale


def test_results_of_older_weights_and_unfinished_ones(runs: Path) -> None:
    (file,) = (runs / "done").glob("result-*.json")
    content = json.loads(file.read_text())
    content["provenance"]["epoch"] = 0
    file.write_text(json.dumps(content))
    (runs / "done" / "result-last.part").mkdir()
    cell = lines(runs)["done"][6]
    assert cell.endswith(" stale, 1 unfinished")
    assert f"stale {file}: of other weights than the run has now" in flatrock("status", runs).output


def test_averaged_weights_are_what_a_run_is_known_by(runs: Path) -> None:
    folder = RunFolder(runs / "stopped")
    record: EpochRecord = folder.records()[0]
    folder.rewrite([replace(record, average_clean=0.5, average_robust=0.25, average_best_epoch=1)])
    now = standing(folder.path)
    assert (now.averaged, now.clean, now.robust) == (True, 0.5, 0.25)
    found = lines(runs)
    assert found["stopped"][2:5] == ["1/3, averaged", "50.00", "25.00"] and found["done"][2] == "3/3"
    assert "averaged: of averaged weights" in " ".join(flatrock("status", runs).output.split())


def test_csv(runs: Path, tmp_path: Path) -> None:
    done = flatrock("status", runs / "stopped", runs / "done", runs, "--csv", tmp_path / "a.csv")
    assert done.exit_code == 0, done.output
    with (tmp_path / "a.csv").open() as file:
        first, second = csv.DictReader(file)
    assert [Path(first["run"]).name, Path(second["run"]).name] == ["stopped", "done"], "as named, each once"
    assert (first["status"], first["reason"], first["epoch"], first["epochs"]) == ("interrupted", "Ctrl-C", "1", "3")
    assert (second["attacks"], second["results"], second["worst_case"]) == (
        "fgsm, pgd-2",
        "1",
        str(read_header(Path(second["result"])).robust),
    )
    assert "must end in .csv" in refusal(flatrock("status", runs, "--csv", tmp_path / "a.txt"))


def test_nothing_to_look_at(tmp_path: Path) -> None:
    assert "there is no folder" in refusal(flatrock("status", tmp_path / "nowhere"))
    assert "there is no run in" in refusal(flatrock("status", tmp_path))


def test_links_lead_to_runs_and_not_in_circles(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "round").symlink_to(tmp_path / "mine")
    (tmp_path / "mine" / "there").symlink_to(runs / "done")
    assert find_runs([tmp_path / "mine"]) == [tmp_path / "mine" / "there"]


def test_a_real_process_and_its_kill(tmp_path: Path) -> None:
    words = [f"{k.replace('__', '.')}={v}" for k, v in TINY.items() if k not in ("device", "train__epochs")]
    begin = [sys.executable, "-m", "flatrock", "train", "digits_standard", *words, "train.epochs=100000"]
    process = subprocess.Popen(
        [*begin, "--device", "cpu", "--run-dir", str(tmp_path / "run")], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    assert lines(tmp_path)["run"][1] == "running now" and standing(tmp_path / "run").epochs == 100000
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert lines(tmp_path)["run"][1] == "killed"


def test_heads_say_what_whole_files_say(tmp_path: Path) -> None:
    """Also of many samples, which are not read for it, and of names with brackets and digits in them."""
    flags = {
        name: torch.arange(2000) % k == 0 for name, k in (("clean", 1), ("pgd-20:a=[1, 2]", 2), ("p/x", 3), ("p/y", 6))
    }
    result = Result(
        threat={"norm": "linf", "eps": 0.1},
        flags=flags,
        plans={"p": ("p/x", "p/y")},
        margins={"clean": torch.randn(2000), "worst": torch.randn(2000)},
        findings=(Finding("E15", "[1, 2]", "none"),),
        marks=("test-selected",),
        provenance={"epoch": 3, "samples": list(range(5))},
    )
    (tmp_path / "result-best.json").write_text(result.to_json())
    head = read_header(tmp_path / "result-best.json")
    assert (head.n, head.clean, head.robust) == (result.n, result.clean, result.robust)
    assert (head.per_attack, head.threat, head.marks) == (result.per_attack, result.threat, result.marks)
    assert head.collapsed and head.provenance == result.provenance


def test_hundreds_are_read_in_a_moment(made: Path, tmp_path: Path) -> None:
    for i in range(200):
        place = tmp_path / f"{i:03d}"
        place.mkdir()
        for file in made.joinpath("done").iterdir():
            if file.suffix in (".json", ".jsonl", ".yaml"):
                shutil.copy(file, place)
    begun = time.process_time()
    assert [standing(run).status for run in find_runs([tmp_path])] == ["finished"] * 200
    assert time.process_time() - begun < 4, "20 ms each on the slowest machine"
