"""`flatrock train --seeds`: all seeds are looked at before the first is trained, and processes share them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from command_cases import Done, flatrock, refusal
from interrupted import Ends

import flatrock as library
from flatrock.cli.train_seeds import SeveralSeeds
from flatrock.core.locks import locked
from flatrock.engine.folder import RunFolder
from flatrock.recipes.load import load_seeds
from flatrock.workflows.folders import making

QUICK = ("train.epochs=2", "data.limit=512", "train.batch_size=64", "select.size=40", "train.tensorboard=false")


def words(folder: Path, *more: str) -> list[str]:
    return ["train", "digits_standard", *QUICK, "--run-dir", str(folder), "--device", "cpu", *more]


def train(folder: Path, *more: str) -> Done:
    return flatrock(*words(folder, *more))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of seeds 0 and 1. Copy them, do not change them."""
    folder = tmp_path_factory.mktemp("seeds")
    assert train(folder / "x", "--seeds", "0-1").exit_code == 0
    return folder


@pytest.fixture
def x(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs" / "x"


def seed(x: Path, number: int) -> RunFolder:
    return RunFolder(x.with_name(f"x-seed{number}"))


def stop(place: Path, number: int) -> None:
    """A run of this seed that was interrupted in its only epoch."""
    recipe = load_seeds("digits_standard", list(QUICK), [number])[number]
    with pytest.raises(KeyboardInterrupt):
        library.train(recipe, folder=place, device="cpu", progress=Ends(3, KeyboardInterrupt))  # type: ignore[arg-type]


def test_every_seed_that_does_not_fit_is_told_before_any_is_trained(x: Path) -> None:
    """Another recipe, something else, a lost state: all at once, and seed 4, which is free, is not begun."""
    stop(seed(x, 3).path, 3)
    for file in (seed(x, 3).state, seed(x, 3).older_state):
        file.unlink(missing_ok=True)
    seed(x, 3).rewrite([seed(x, 0).records()[0]])
    seed(x, 2).path.mkdir()
    (seed(x, 2).path / "thesis.txt").write_text("mine")
    done = train(x, "optimizer.lr=0.3", "--seeds", "4,0,1,2", "--resume")
    said = refusal(done)
    assert "no seed was trained:" in said
    for number in (0, 1):
        assert f"- seed {number}: {seed(x, number).path} is a run of another recipe: optimizer.lr: " in said
    assert f"- seed 2: {seed(x, 2).path} holds something that is not a flatrock run; repeat the overrides" in said
    assert not seed(x, 4).path.exists()
    lost = refusal(train(x, "--seeds", "0,3,4", "--resume"))
    assert f"- seed 3: {seed(x, 3).path} cannot be resumed: there is no state.safetensors; train it anew" in lost
    assert "--overwrite with --seeds replaces all" in lost and "seed 0" not in lost
    assert not seed(x, 4).path.exists()


def test_overwrite_spares_what_is_no_run_before_any_is_replaced(x: Path) -> None:
    before = seed(x, 0).best.stat().st_mtime_ns
    seed(x, 2).path.mkdir()
    (seed(x, 2).path / "thesis.txt").write_text("mine")
    said = refusal(train(x, "--seeds", "0,2", "--overwrite"))
    assert f"- seed 2: {seed(x, 2).path} holds something that is not a flatrock run, and is left alone" in said
    assert seed(x, 0).best.stat().st_mtime_ns == before
    both = refusal(train(x, "--seeds", "0,2", "--overwrite", "--resume"))
    assert "--resume and --overwrite exclude each other" in both


def test_a_run_killed_at_its_beginning_begins_again(x: Path) -> None:
    """Nothing of it was stored, and --overwrite, which would be the cure of one run, would replace the others."""
    stop(seed(x, 2).path, 2)
    for file in seed(x, 2).path.iterdir():
        if file != seed(x, 2).info:
            file.unlink()
    before = seed(x, 0).best.stat().st_mtime_ns
    done = train(x, "--seeds", "0,2", "--resume")
    assert done.exit_code == 0, done.output
    assert "x-seed2 was stopped before anything of it was stored; it begins again" in done.output
    assert seed(x, 2).run().status == "finished" and seed(x, 0).best.stat().st_mtime_ns == before


def test_small_files_that_resuming_mends_are_no_obstacle(x: Path) -> None:
    seed(x, 0).recipe.write_text("edited: yes")
    seed(x, 1).info.write_text("{")
    done = train(x, "--seeds", "0-1", "--resume")
    assert done.exit_code == 0, done.output
    assert seed(x, 1).run().status == "finished" and "edited" not in seed(x, 0).recipe.read_text()
    seed(x, 0).recipe.write_text("edited: yes")
    assert f"- seed 0: {seed(x, 0).recipe}" in refusal(train(x, "optimizer.lr=0.3", "--seeds", "0,2", "--resume"))
    assert not seed(x, 2).path.exists()


def test_an_interrupted_seed_goes_on(x: Path) -> None:
    stop(seed(x, 2).path, 2)
    done = train(x, "--seeds", "1-2", "--resume")
    assert done.exit_code == 0, done.output
    assert "mean ± s.d. of 2" in done.output and len(seed(x, 2).resumptions()) == 1


@pytest.mark.parametrize("how", ["--resume", ""])
def test_a_seed_that_another_process_trains_is_left_and_the_next_is_taken(tmp_path: Path, how: str) -> None:
    x = tmp_path / "x"
    seed(x, 0).path.mkdir()
    with seed(x, 0).locked():
        (seed(x, 0).path / ".run.json.part").write_text("")  # it has begun
        done = train(x, "--seeds", "0,1", *filter(None, [how]))
    assert done.exit_code == 3, done.output
    assert f"left seed 0: process {os.getpid()} is training into {seed(x, 0).path}" in done.output
    assert "not made seed 0: " in done.output and "then the same command with --resume" in done.output
    assert seed(x, 1).run().status == "finished" and "1 seed of digits_standard" in done.output


def test_a_failure_counts_more_than_a_seed_that_is_left(tmp_path: Path) -> None:
    x = tmp_path / "x"
    with making(seed(x, 0).path):
        done = train(x, "--seeds", "0,1", "optimizer.lr=1e30")
    assert done.exit_code == 1, done.output
    assert f"left seed 0: process {os.getpid()} is making {seed(x, 0).path}; wait for it" in done.output


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_another_process_made_since_is_taken_as_it_is(x: Path, made: Path, overwrite: bool) -> None:
    """Two commands that begin together: what one has finished the other neither refuses nor trains again."""
    for number in () if overwrite else (0, 1):
        shutil.rmtree(seed(x, number).path)
    recipes = load_seeds("digits_standard", list(QUICK), [0, 1])
    folders = {number: seed(x, number).path for number in recipes}
    several = SeveralSeeds(recipes, folders, resume=False, overwrite=overwrite)
    several.look()
    shutil.rmtree(folders[1], ignore_errors=True)
    shutil.copytree(made / "x-seed1", folders[1])
    os.utime(folders[1] / "run.json")
    trained: list[int] = []

    def train_one(recipe: object, folder: Path, **how: object) -> None:
        trained.append(int(folder.name[-1]))

    runs, left = several.train(train_one)
    assert trained == [0] and left == {}
    assert runs[0] is None and runs[1] is not None and runs[1].status == "finished"


def test_two_commands_share_the_seeds(tmp_path: Path) -> None:
    """Begun at once, each trains what the other does not; every seed is trained once."""
    begin = [sys.executable, "-m", "flatrock", *words(tmp_path / "x", "--seeds", "0-3", "train.epochs=8", "--resume")]
    both = [subprocess.Popen(begin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[0] for process in both]
    codes = {process.returncode for process in both}
    assert 0 in codes and codes <= {0, 3}, said  # whose last seed ends last sees that all are there
    infos = [json.loads(seed(tmp_path / "x", number).info.read_text()) for number in range(4)]
    assert [info["status"] for info in infos] == ["finished"] * 4
    assert sum(text.count("finished: 8 epochs") for text in said) >= 4
    begun = sum(text.count("there is nothing to resume in") for text in said)
    assert begun == 4, "each seed was begun by one of them"


@pytest.mark.parametrize("how", ["made", "killed"])
def test_what_another_process_was_training_is_looked_at_again(tmp_path: Path, made: Path, how: str) -> None:
    """It has ended, or was killed, while the other seed was trained here."""
    recipes = load_seeds("digits_standard", list(QUICK), [0, 1])
    folders = {number: seed(tmp_path / "x", number).path for number in recipes}
    several = SeveralSeeds(recipes, folders, resume=False, overwrite=False)
    several.look()
    trained: list[int] = []
    with ExitStack() as other:
        other.enter_context(making(folders[0]))
        if how == "made":
            other.callback(shutil.copytree, made / "x-seed0", folders[0])

        def train_one(recipe: object, folder: Path, **options: object) -> None:
            trained.append(int(folder.name[-1]))
            other.close()

        runs, left = several.train(train_one)
    assert left == {} and list(runs) == [0, 1]
    assert trained == ([1] if how == "made" else [1, 0])


def test_a_held_lock_of_nobody_else_is_no_obstacle(tmp_path: Path) -> None:
    """A lock beside another folder of the same beginning."""
    with locked(tmp_path / ".x-seed10.lock", "making", tmp_path):
        assert train(tmp_path / "x", "--seeds", "1").exit_code == 0
