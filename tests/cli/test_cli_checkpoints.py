"""`flatrock eval --which kept`: several checkpoints, the same as alone, resumably, and the best of each, marked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_cases import flatrock as invoked
from command_cases import refusal
from typer.testing import Result as Done

import flatrock.cli.evaluate as command

EVAL = ("--attacks", "fgsm,pgd-2", "--limit", "60", "--no-doubt", "--device", "cpu")


def flatrock(*words: object) -> Done:
    return invoked(*map(str, words))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs of digits, all kept, that ask for more."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    small = ("train.epochs=3", "data.limit=512", "train.batch_size=64", "attack.steps=2", "select.size=40")
    more = "evaluate.more=[{attacks: [pgd-1], eps: 0.1}]"
    keep = ("train.keep.every=1", "evaluate.attacks=[pgd-1]", more)
    done = flatrock("train", "digits_at", *small, *keep, "--run-dir", folder, "--device", "cpu")
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def stored(folder: Path, which: str, end: str = "-fgsm_pgd-2-n60-seed0") -> Any:
    return json.loads((folder / f"result-{which}{end}.json").read_text())


def table(done: Done) -> list[list[str]]:
    """The lines of the last table, cell by cell."""
    lines = done.output[done.output.index("checkpoint by checkpoint") :].splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]


def test_each_is_as_if_evaluated_alone(run: Path) -> None:
    done = flatrock("eval", run, *EVAL, "--which", "kept,best")
    assert done.exit_code == 0, done.output
    names = ["epoch-0001", "epoch-0002", "epoch-0003", "best"]
    together = [stored(run, name) for name in names]
    assert all(f"{name}, {nth} of 4" in done.output for nth, name in enumerate(names, 1))
    for name, found in zip(names, together, strict=True):
        source = (run, "--which", "best") if name == "best" else (run / f"{name}.safetensors",)
        assert flatrock("eval", *source, *EVAL).exit_code == 0
        alone = stored(run, name)
        assert (alone["flags"], alone["provenance"]["epoch"]) == (found["flags"], found["provenance"]["epoch"])
    rows = table(done)
    assert [row[0].removesuffix(" COLLAPSED") for row in rows] == [*names, "best of each*"]
    assert rows[2][1:] == [f"{100 * together[2][key]:.2f}" for key in ("clean",)] + [
        f"{100 * share:.2f}"
        for share in (*(together[2]["per_attack"][a] for a in ("fgsm", "pgd-2")), together[2]["robust"])
    ]
    assert all(cell.endswith("*") for cell in rows[-1]) and "chosen on the test set" in done.output
    sound = [one for one, row in zip(together, rows, strict=False) if "COLLAPSED" not in row[0]]
    assert rows[-1][2] == f"{100 * max(one['per_attack']['fgsm'] for one in sound):.2f}*"
    best = max(sound, key=lambda one: one["per_attack"]["pgd-2"])
    assert rows[-1][1] == f"{100 * best['clean']:.2f}*"
    assert f"clean is that of {names[together.index(best)]}, the highest under pgd-2" in " ".join(done.output.split())


def test_one_epoch_by_name(run: Path) -> None:
    for name in ("epoch-2", "epoch-0002"):
        done = flatrock("eval", run, *EVAL, "--which", name)
        assert done.exit_code == 0 and "checkpoint by checkpoint" not in done.output, done.output
    assert stored(run, "epoch-0002")["provenance"]["epoch"] == 2


def test_what_a_recipe_asks_beside_is_asked_of_each(run: Path) -> None:
    done = flatrock("eval", run, "--which", "epoch-2,epoch-3", "--no-doubt", "--device", "cpu")
    assert done.exit_code == 0, done.output
    for epoch in ("epoch-0002", "epoch-0003"):
        assert stored(run, epoch, "")["provenance"]["whole_plan"]
        assert stored(run, epoch, "-linf-0.1-pgd-1-n500-seed0")["threat"]["eps"] == 0.1
    header = next(line for line in done.output.splitlines()[::-1] if "checkpoint" in line and "┃" in line)
    assert [cell.strip() for cell in header.split("┃")[1:-1]] == [
        "checkpoint", "clean", "pgd-1", "pgd-1@0.1", "worst case"
    ]  # fmt: skip


def test_what_was_stopped_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch, attempts: list[int]) -> None:
    real = command.evaluate_run

    def stopped(source: Path, **how: Any) -> Any:
        if source.stem == "epoch-0003":
            raise KeyboardInterrupt
        return real(source, **how)

    with monkeypatch.context() as patch:
        patch.setattr(command, "evaluate_run", stopped)
        assert flatrock("eval", run, *EVAL, "--which", "kept").exit_code == 130
    attempts.clear()
    done = flatrock("eval", run, *EVAL, "--which", "kept", "--resume")
    assert done.exit_code == 0, done.output
    assert len(attempts) == 2, "two attacks on the third epoch; the others are on disk"
    assert done.output.count("which was evaluated before") == 2 and len(table(done)) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--which", "kept,epoch-7"), "keeps no epoch-7 (kept: 1, 2, 3)"),
        (("--which", "keept"), "unknown checkpoint 'keept'"),
        (("--which", ","), "which names no checkpoint"),
        (("--which", "kept", "--csv", "a.csv"), "--csv is of one checkpoint, but --which names 3"),
        (("--which", "best,last", "--seeds", "0,1"), "is of one checkpoint, but --which names 2"),
        (("--which", "kept", "--eps", "0.1,0.2"), "--eps with several radii, is of one checkpoint"),
    ],
)
def test_what_cannot_be_asked_is_told_before_the_first(
    words: tuple[str, ...], said: str, run: Path, attempts: list[int]
) -> None:
    assert said in refusal(flatrock("eval", run, *EVAL, *words))
    assert attempts == [] and not list(run.glob("result-*"))


def test_radii_of_one_kept_epoch(run: Path) -> None:
    done = flatrock("eval", run, *EVAL, "--which", "epoch-3", "--eps", "0.1,0.05")
    assert done.exit_code == 0, done.output
    assert stored(run, "epoch-0003", "-linf-0.05-fgsm_pgd-2-n60-seed0")["threat"]["eps"] == 0.05
