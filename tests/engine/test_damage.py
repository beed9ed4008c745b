"""Damage to any file of a run is refused by name or undone; it never changes a number in silence."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flatrock.core.errors import FlatrockError, StateError
from flatrock.core.tensorfile import load
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.recipes.restore import load as load_model

MakeJob = Callable[..., Job]
Shot = Callable[..., dict[str, Any]]

FILES = (
    "state.safetensors",
    "state.older.safetensors",
    "best.safetensors",
    "last.safetensors",
    "metrics.jsonl",
    "run.json",
    "recipe.yaml",
)


class Tripwire:
    """Unpickling this fails the test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle from the run folder was executed",)


def truncate(file: Path, rng: random.Random, other: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))])


def flip(file: Path, rng: random.Random, other: Path) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def flip_near_the_top(file: Path, rng: random.Random, other: Path) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(min(len(content), 3000))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def zero_block(file: Path, rng: random.Random, other: Path) -> None:
    content = bytearray(file.read_bytes())
    start = rng.randrange(len(content))
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    file.write_bytes(content)


def append_junk(file: Path, rng: random.Random, other: Path) -> None:
    file.write_bytes(file.read_bytes() + rng.choice([b"\n", b"\x00" * 9, b"junk", rng.randbytes(100)]))


def delete(file: Path, rng: random.Random, other: Path) -> None:
    file.unlink()


def empty(file: Path, rng: random.Random, other: Path) -> None:
    file.write_bytes(b"")


def anothers(file: Path, rng: random.Random, other: Path) -> None:
    """The file of the same name of a run with another seed."""
    shutil.copy(other / file.name, file)


def siblings(file: Path, rng: random.Random, other: Path) -> None:
    """Another checkpoint of the same run: last for best, best for last, one state for the other."""
    pairs = {"best": "last", "last": "best", "state": "state.older", "state.older": "state"}
    shutil.copy(file.with_name(f"{pairs[file.stem]}.safetensors"), file)


def foreign(file: Path, rng: random.Random, other: Path) -> None:
    save_file({"model/head.weight": torch.zeros(10, 64)}, file)


def pickled(file: Path, rng: random.Random, other: Path) -> None:
    file.write_bytes(pickle.dumps({"model": Tripwire()}))


DAMAGES = [truncate, flip, flip_near_the_top, zero_block, append_junk]
DAMAGES += [delete, empty, anothers, siblings, foreign, pickled]


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory, make_job: MakeJob) -> Path:
    folder = tmp_path_factory.mktemp("other") / "run"
    train(make_job(folder, seed=5))
    return folder


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory, make_job: MakeJob, stopper: Callable[[int], Any]) -> Path:
    """A run stopped in its fourth epoch: state, older state and last hold epochs 3, 2 and 3."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        train(make_job(folder), progress=stopper(11))
    return folder


@pytest.fixture(scope="module")
def shots(small_shot: dict[str, Any], stopped_run: Path, snapshot: Shot) -> dict[str, Any]:
    """The truth at both stages."""
    return {"stopped": snapshot(stopped_run), "finished": small_shot}


def weights(folder: Path, which: str) -> dict[str, bytes]:
    return {f"model/{k}": v.numpy().tobytes() for k, v in load_model(folder, which=which).state_dict().items()}


class Judge:
    """Knows the truth about a run and lets every reader have a go at the damaged copy of it."""

    def __init__(self, folder: Path, *, now: dict[str, Any], end: dict[str, Any], snapshot: Shot) -> None:
        self.folder, self.now, self.end, self.snapshot = folder, now, end, snapshot

    def heard(self, action: Callable[[], Any]) -> Any:
        """What the action returns, or None if it refused; a refusal names the run."""
        try:
            return action()
        except FlatrockError as error:
            assert str(self.folder) in str(error), f"the message does not say what is damaged: {error}"
            return None

    def readers(self, truth: dict[str, Any]) -> None:
        for which in ("best", "last"):
            got = self.heard(lambda which=which: weights(self.folder, which))
            assert got is None or got == truth[f"{which}.safetensors"][0], f"{which}: other weights, in silence"

    def check(self, resumed: Callable[[], Any]) -> None:
        self.readers(self.now)
        run = self.heard(lambda: RunFolder(self.folder).run())
        if run is not None:
            got = [{k: r.to_dict()[k] for k in ("epoch", "robust", "terms")} for r in run.records]
            expected = [{k: r[k] for k in ("epoch", "robust", "terms")} for r in self.now["records"]]
            # A reader may meet a running run between two of its lines, so fewer epochs are no lie there.
            assert got == (expected if self.now is self.end else expected[: len(got)]), "other records, in silence"
        if self.heard(resumed) is None:
            return
        assert RunFolder(self.folder).run().status == "finished"
        self.readers(self.end)
        judged = ("best.safetensors", "last.safetensors")
        shot = self.snapshot(self.folder, skip=judged)
        assert shot == {name: value for name, value in self.end.items() if name not in judged}


def cases() -> Iterator[Any]:
    """Every damage to every file, at the stage where the file matters most; a wrong file at both."""
    for damage in DAMAGES:
        for name in FILES:
            if damage in (siblings, flip_near_the_top) and not name.endswith(".safetensors"):
                continue
            both = damage in (anothers, siblings)
            for stage in ["stopped", "finished"] if both else ["stopped" if "state" in name else "finished"]:
                yield pytest.param(damage, name, stage, id=f"{damage.__name__}-{name}-{stage}")


@pytest.mark.parametrize(("damage", "name", "stage"), list(cases()))
def test_damage(
    make_job: MakeJob,
    small_run: Path,
    stopped_run: Path,
    other_run: Path,
    tmp_path: Path,
    snapshot: Shot,
    shots: dict[str, Any],
    damage: Callable[..., None],
    name: str,
    stage: str,
) -> None:
    rng = random.Random(f"{damage.__name__} {name} {stage}")
    folder = Path(shutil.copytree({"stopped": stopped_run, "finished": small_run}[stage], tmp_path / "run"))
    judge = Judge(folder, now=shots[stage], end=shots["finished"], snapshot=snapshot)
    damage(folder / name, rng, other_run)
    judge.check(lambda: train(make_job(folder), resume=True))


@pytest.mark.parametrize("name", ["last.safetensors", "best.safetensors"])
def test_weights_in_place_of_the_state_are_refused(
    make_job: MakeJob, stopped_run: Path, tmp_path: Path, name: str
) -> None:
    """They carry the right recipe and the right tensors, but not what a run needs to go on."""
    folder = Path(shutil.copytree(stopped_run, tmp_path / "run"))
    for state in ("state.safetensors", "state.older.safetensors"):
        shutil.copy(folder / name, folder / state)
    with pytest.raises(StateError, match=r"state\.safetensors"):
        train(make_job(folder), resume=True)


@pytest.mark.parametrize("text", ["null", "5", '"text"', "[1, 2]", "[]", "{}", '{"status": 3}'])
def test_run_json_that_is_json_but_no_run(
    make_job: MakeJob, small_run: Path, tmp_path: Path, snapshot: Shot, small_shot: dict[str, Any], text: str
) -> None:
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    judge = Judge(folder, now=small_shot, end=small_shot, snapshot=snapshot)
    (folder / "run.json").write_text(text)
    with pytest.raises(StateError, match=r"run\.json"):
        RunFolder(folder).run()
    judge.check(lambda: train(make_job(folder), resume=True))


def test_resume_mends_the_small_files(
    make_job: MakeJob, stopped_run: Path, tmp_path: Path, small_run: Path, small_shot: dict[str, Any], snapshot: Shot
) -> None:
    """What the state knows is written again: records, status and the recipe people read and train again from."""
    folder = Path(shutil.copytree(stopped_run, tmp_path / "run"))
    recipe = (small_run / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("eps: 0.1", "eps: 0.9"))
    (folder / "run.json").write_text("{")
    (folder / "metrics.jsonl").write_text("?")
    train(make_job(folder), resume=True)
    assert snapshot(folder) == small_shot
    assert RunFolder(folder).read_info()["recipe_hash"] == RunFolder(small_run).read_info()["recipe_hash"]
    assert (folder / "recipe.yaml").read_text() == recipe


def test_resume_of_a_finished_run_mends_last(make_job: MakeJob, small_run: Path, tmp_path: Path) -> None:
    """The state holds the weights after the last epoch, so `last` can be had again."""
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    truth = weights(folder, "last")
    (folder / "last.safetensors").write_bytes(b"junk")
    train(make_job(folder), resume=True)
    assert weights(folder, "last") == truth


@pytest.mark.parametrize("offset", [0, 7, 8, 9, 40, -1, -5000])
def test_a_flipped_bit_in_a_checkpoint(small_run: Path, tmp_path: Path, offset: int) -> None:
    """Length of the header, header, tensor bytes; all 8 bits."""
    content = (small_run / "best.safetensors").read_bytes()
    for bit in range(8):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << bit
        (tmp_path / "x.safetensors").write_bytes(damaged)
        with pytest.raises(StateError, match=r"x\.safetensors"):
            load(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"model/bn1.bias", b"model/bn1.biat"),  # sorts alike, so only the name itself tells
        (b'"shape":[10,64]', b'"shape":[64,10]'),
        (b'"dtype":"I64"', b'"dtype":"F64"'),
        (rb"\"seed\": 4", rb"\"seed\": 5"),
    ],
    ids=["name", "shape", "dtype", "meta"],
)
def test_everything_in_the_header_is_under_the_digest(small_run: Path, tmp_path: Path, old: bytes, new: bytes) -> None:
    """A valid file with the same bytes in every tensor, but not the file that was written."""
    content = (small_run / "best.safetensors").read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    assert old in content[:size]
    (tmp_path / "x.safetensors").write_bytes(content[:size].replace(old, new) + content[size:])
    with pytest.raises(StateError, match="its digest does not match"):
        load(tmp_path / "x.safetensors")


def test_metrics_lines_out_of_order_or_twice(small_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(small_run, tmp_path / "run"))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    for bad in ([lines[1], lines[0], *lines[2:]], [*lines, lines[-1]], lines[1:], [lines[0], *lines[2:]], lines[:3]):
        (folder / "metrics.jsonl").write_text("".join(bad))
        with pytest.raises(StateError, match=r"metrics\.jsonl has lost epochs"):
            RunFolder(folder).run()
