"""Small digits runs and the means to stop, copy and compare them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flatrock.core.progress import Silent
from flatrock.core.tensorfile import load
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job, ProbeOutcome
from flatrock.engine.loop import train
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.schema import Recipe

SMALL = Path(__file__).with_name("small.yaml")
TIMES = ("seconds", "images_per_second", "elapsed", "save_seconds")


class Listener(Silent):
    """Counts steps, keeps what is said, and calls `at` with the number of steps done."""

    def __init__(self, at: Callable[[int], None] = lambda step: None) -> None:
        self.steps = 0
        self.said: list[str] = []
        self._at = at

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.steps = done

    def advance(self, units: int, note: str = "") -> None:
        self.steps += units
        self._at(self.steps)

    def say(self, text: str) -> None:
        self.said.append(text)


def timeless(value: Any) -> Any:
    """The value without the keys that say how long something took."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in TIMES}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def bits(file: Path) -> tuple[dict[str, bytes], Any]:
    """Every tensor of a checkpoint as bytes, and its meta without times."""
    tensors, meta = load(file)
    return {name: t.numpy().tobytes() for name, t in tensors.items()}, timeless(meta)


def _snapshot(folder: Path, *, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    names = ["state.safetensors", "best.safetensors", "last.safetensors", "epoch-*.safetensors"]
    files = [f for name in names for f in sorted(folder.glob(name)) if f.name not in skip]
    records = [timeless(r.to_dict()) for r in RunFolder(folder).records()]
    return {"records": records, **{f.name: bits(f) for f in files}}


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Hundreds of small runs: no waiting for the disk.

    Forcing files to the disk guards against power cuts, which no test here can make.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def make_recipe() -> Callable[..., Recipe]:
    """The small recipe with overrides such as train__epochs=2."""
    return lambda **overrides: load_recipe(SMALL, overrides)


def dressed(probe: Callable[[nn.Module], ProbeOutcome]) -> Callable[[nn.Module], ProbeOutcome]:
    """The probe, except that no model is called collapsed and the weights after 9 steps look best.

    A few steps may well end in a model that predicts one class, and which epoch is best would be a matter of luck.
    """

    def look(model: nn.Module) -> ProbeOutcome:
        outcome = replace(probe(model), collapsed=False)
        ticks = [int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
        return replace(outcome, robust=1.0) if 9 in ticks else outcome

    return look


@pytest.fixture(scope="session")
def plain_job(make_recipe: Callable[..., Recipe]) -> Callable[..., Job]:
    """A job of the small recipe in a folder, just as it is built."""
    return lambda folder, **overrides: build_job(make_recipe(**overrides), folder=folder)


@pytest.fixture(scope="session")
def make_job(plain_job: Callable[..., Job]) -> Callable[..., Job]:
    """A job of the small recipe whose run ends well; its third epoch is its best."""

    def make(folder: Path, **overrides: Any) -> Job:
        job = plain_job(folder, **overrides)
        return replace(job, probe=dressed(job.probe))

    return make


@pytest.fixture(scope="session")
def snapshot() -> Callable[..., dict[str, Any]]:
    """Everything in a run folder that must not depend on how often the run was stopped."""
    return _snapshot


@pytest.fixture(scope="session")
def listener() -> Callable[..., Listener]:
    """A progress listener; see Listener."""
    return Listener


@pytest.fixture(scope="session")
def stopper() -> Callable[[int], Listener]:
    """A listener that interrupts training once `step` steps are done."""

    def make(step: int) -> Listener:
        def at(done: int) -> None:
            if done >= step:
                raise KeyboardInterrupt

        return Listener(at)

    return make


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory, make_job: Callable[..., Job]) -> Path:
    """The folder of the small recipe trained without a stop. Copy it, do not change it."""
    folder = tmp_path_factory.mktemp("small") / "run"
    train(make_job(folder))
    return folder


@pytest.fixture(scope="session")
def small_shot(small_run: Path) -> dict[str, Any]:
    """The snapshot of the run that was never stopped."""
    return _snapshot(small_run)


@pytest.fixture(scope="session")
def helper_run(make_job: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network trained without attacks until its answers do not hang on rounding. Copy it, do not change it."""
    folder = tmp_path_factory.mktemp("helper") / "run"
    keys = {"objective": {"name": "standard"}, "attack": {}, "seed": 1}
    train(make_job(folder, **keys, data__limit=800, train__epochs=6))
    return folder


@pytest.fixture
def hat(make_job: Callable[..., Job], helper_run: Path, tmp_path: Path) -> Callable[..., Job]:
    """A job of HAT in a folder of this name."""

    def make(name: str = "run", *, helper: Path = helper_run, **overrides: Any) -> Job:
        keys = {"objective": {"name": "hat", "helper": str(helper), **overrides.pop("options", {})}}
        return make_job(tmp_path / name, **keys, **overrides)

    return make
