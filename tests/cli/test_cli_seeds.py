"""`--seeds 0,1,2` of train and eval: one run or evaluation each, the same as alone, and a table of all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_cases import flatrock
from typer.testing import Result

import flatrock.cli.evaluate as command
from flatrock.cli.shared import seeds_of
from flatrock.core.errors import ConfigError
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.journal import journaled
from flatrock.recipes.restore import load

EVAL = ["--attacks", "pgd-3", "--limit", "60", "--no-doubt", "--device", "cpu"]
QUICK = ["train.epochs=3", "data.limit=512", "train.batch_size=64", "select.size=40"]


def train(folder: Path, *words: str) -> Result:
    return flatrock("train", "digits_standard", *QUICK, "--run-dir", str(folder), "--device", "cpu", *words)


def metrics(folder: Path) -> dict[str, Any]:
    """The last record, but for times."""
    last: dict[str, Any] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {k: v for k, v in last.items() if k not in ("seconds", "elapsed", "images_per_second", "crc")}


def test_train(tmp_path: Path) -> None:
    """As many runs, each as if trained alone; what is there is refused before the first of them begins."""
    alone = train(tmp_path / "alone", "seed=4")
    done = train(tmp_path / "x", "--seeds", "2,4")
    assert (alone.exit_code, done.exit_code) == (0, 0), done.output
    assert "mean ± s.d." in done.output
    assert [f"next: flatrock eval {tmp_path / n}" in done.output for n in ("x-seed2", "x-seed4")] == [True, True]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "x-seed2", "x-seed4"]
    assert metrics(tmp_path / "x-seed4") == metrics(tmp_path / "alone")
    assert metrics(tmp_path / "x-seed2") != metrics(tmp_path / "alone")
    again = train(tmp_path / "x", "--seeds", "1,2,4")
    assert again.exit_code == 2
    assert f"in use: {tmp_path / 'x-seed2'}, {tmp_path / 'x-seed4'}; continue with --resume" in again.output
    assert not (tmp_path / "x-seed1").exists()
    before = (tmp_path / "x-seed2" / "best.safetensors").stat().st_mtime_ns
    more = train(tmp_path / "x", "--seeds", "1,2", "--resume")
    assert "there is nothing to resume" in more.output
    assert metrics(tmp_path / "x-seed1") != metrics(tmp_path / "x-seed2")
    assert (tmp_path / "x-seed2" / "best.safetensors").stat().st_mtime_ns == before


def test_a_run_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    done = train(tmp_path / "x", "--seeds", "0,1", "optimizer.lr=1e30")
    assert done.exit_code == 1
    assert done.output.count("FAILED: ") == 2
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["x-seed0", "x-seed1"]
    assert "mean" not in done.output and "next:" not in done.output


def test_eval(run_folder: Path) -> None:
    done = flatrock("eval", str(run_folder), *EVAL, "--seeds", "1,2")
    assert done.exit_code == 0, done.output
    together = [stored(run_folder, seed) for seed in (1, 2)]
    assert [flatrock("eval", str(run_folder), *EVAL, "--seed", str(s)).exit_code for s in (1, 2)] == [0, 0]
    alone = [stored(run_folder, seed) for seed in (1, 2)]
    assert [r["flags"] for r in together] == [r["flags"] for r in alone]
    assert together[0]["margins"] != together[1]["margins"]
    assert "mean ± s.d." in done.output and "all seeds" in done.output


def stored(folder: Path, seed: int) -> Any:
    return json.loads((folder / f"result-best-pgd-3-n60-seed{seed}.json").read_text())


def test_an_interrupted_seed_costs_those_before_it_nothing(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = command.evaluate_run

    def stopped(source: Path, **how: Any) -> Any:
        if how["seed"] == 6:
            raise KeyboardInterrupt
        return real(source, **how)

    monkeypatch.setattr(command, "evaluate_run", stopped)
    assert flatrock("eval", str(run_folder), *EVAL, "--seeds", "5,6").exit_code == 130
    before = stored(run_folder, 5)
    monkeypatch.undo()
    tried: list[int] = []
    attempt = Exam.attempt
    monkeypatch.setattr(Exam, "attempt", lambda *args: tried.append(1) or attempt(*args))
    done = flatrock("eval", str(run_folder), *EVAL, "--seeds", "5,6", "--resume")
    assert done.exit_code == 0, done.output
    assert len(tried) == 1, "the one batch of seed 6; that of seed 5 is on disk"
    assert stored(run_folder, 5) == before
    assert before["provenance"]["seed"] == 5


def stop(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """An evaluation that ends after its first batch."""

    def interrupt(*more: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("flatrock.cli.evaluate.TerminalProgress.advance", interrupt)
        assert flatrock("eval", *words).exit_code == 130


OWN = ("--model", "digits_cnn", "--data", "digits", "--norm", "linf", "--eps", "1/5", "--num-classes", "10")


@pytest.mark.parametrize("of", ["run", "model"])
def test_every_seed_is_looked_at_before_the_first_is_evaluated(
    of: str, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: list[int]
) -> None:
    """What was stopped, what asks something else and what is no evaluation: all told at once, before any attack."""
    folder, source = copied, (str(copied),)
    if of == "model":
        monkeypatch.chdir(tmp_path)
        torch.save(load(copied).state_dict(), "own.pt")
        source, folder = (*OWN, "--weights", "own.pt"), Path()
    stop(monkeypatch, *source, *EVAL, "--seed", "21")
    stop(monkeypatch, *source, *EVAL, "--seed", "23", "--batch-size", "7")
    (there,) = folder.glob("*seed21*.part")
    parts = {seed: there.with_name(there.name.replace("seed21", f"seed{seed}")) for seed in (0, 21, 22, 23)}
    parts[22].mkdir()
    (parts[22] / "photo.png").write_bytes(b"mine")
    before = sorted(folder.rglob("*"))
    attempts.clear()
    refused = flatrock("eval", *source, *EVAL, "--seeds", "0,21,22,23")
    assert refused.exit_code == 2
    assert f"  - {parts[21]} holds 1 finished batches of an evaluation that was stopped; go on with" in refused.output
    assert f"  - {parts[22]} exists and is not an unfinished evaluation" in refused.output
    assert f"  - {parts[23]} holds 1 finished batches" in refused.output
    resumed = flatrock("eval", *source, *EVAL, "--seeds", "0,21,22,23", "--resume")
    assert resumed.exit_code == 2
    assert f"  - {parts[22]} exists and is not" in resumed.output and str(parts[21]) not in resumed.output
    assert f"  - {parts[23]} belongs to another evaluation (different: batch_size)" in resumed.output
    assert attempts == [] and sorted(folder.rglob("*")) == before
    done = flatrock("eval", *source, *EVAL, "--seeds", "0,21", "--resume")
    assert done.exit_code == 0, done.output
    assert len(attempts) == 1, "that of seed 0; the batch of seed 21 was there"


def test_a_seed_that_another_process_evaluates_is_told_before_the_first(copied: Path, attempts: list[int]) -> None:
    part = copied / "result-best-pgd-3-n60-seed32.part"
    with journaled(part, {}, resume=False):
        done = flatrock("eval", str(copied), *EVAL, "--seeds", "31,32")
    assert done.exit_code == 2 and attempts == []
    assert f"  - process {os.getpid()} is evaluating into {part}; wait for it" in done.output


def test_batches_of_something_else_beside_a_finished_seed_are_no_obstacle(
    copied: Path, monkeypatch: pytest.MonkeyPatch, attempts: list[int]
) -> None:
    assert flatrock("eval", str(copied), *EVAL, "--seeds", "41,42").exit_code == 0
    stop(monkeypatch, str(copied), *EVAL, "--seed", "42", "--batch-size", "7")
    attempts.clear()
    done = flatrock("eval", str(copied), *EVAL, "--seeds", "41,42", "--resume")
    assert done.exit_code == 0, done.output
    assert attempts == [] and len(list(copied.glob("*seed42.part/chunk-*"))) == 1


@pytest.mark.parametrize("text", ["", "0,", "1,-2", "a,b", "0;1", "1.5,2", "4-2", "0-", "0-99999", "²"])
@pytest.mark.parametrize("of", ["train", "eval"])
def test_seeds_that_are_none(text: str, of: str, run_folder: Path, tmp_path: Path) -> None:
    done = (
        train(tmp_path / "x", "--seeds", text) if of == "train" else flatrock("eval", str(run_folder), "--seeds", text)
    )
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert "seeds must be whole numbers or ranges of them (of 1000 at most), such as 0,1,2 or 0-4 or 3" in said
    assert f"got {text!r}" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "seeds"), [("3", [3]), ("0-2", [0, 1, 2]), ("7, 2-4 ,0", [7, 2, 3, 4, 0])])
def test_ranges_and_single_seeds(text: str, seeds: list[int]) -> None:
    assert seeds_of(text) == seeds


def test_a_seed_given_twice_is_named() -> None:
    with pytest.raises(ConfigError, match="seeds must differ, got '0,2-4,3,0' with 0, 3 twice"):
        seeds_of("0,2-4,3,0")


def test_a_single_seed_is_a_table_of_one(run_folder: Path, tmp_path: Path) -> None:
    trained = train(tmp_path / "x", "--seeds", "5")
    assert trained.exit_code == 0, trained.output
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["x-seed5"]
    assert "1 seed of digits_standard" in trained.output and "mean" not in trained.output
    evaluated = flatrock("eval", str(run_folder), *EVAL, "--seeds", "51")
    assert evaluated.exit_code == 0, evaluated.output
    assert stored(run_folder, 51)["provenance"]["seed"] == 51 and "mean" not in evaluated.output


@pytest.mark.parametrize("folder", [".", "/", ".."])
def test_a_folder_without_a_name_cannot_be_numbered(folder: str) -> None:
    done = train(Path(folder), "--seeds", "0,1")
    assert done.exit_code == 2
    assert f"run-dir must end in a name with --seeds, got {folder!r}" in done.output


def test_what_is_of_one_seed_only(run_folder: Path, tmp_path: Path) -> None:
    done = flatrock("eval", str(run_folder), "--seeds", "0,1", "--seed", "3", "--csv", str(tmp_path / "a.csv"))
    assert done.exit_code == 2
    assert "--seed, --csv: of one evaluation, but --seeds asks for several" in done.output
    both = train(tmp_path / "x", "--seeds", "0,1", "seed=3")
    assert both.exit_code == 2
    assert "seed=3 and --seeds exclude each other" in both.output
    assert not list(tmp_path.iterdir())
