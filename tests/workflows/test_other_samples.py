"""A run looked at on other data than its own: refused, or said; no record is taken for one of other samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from flatrock.cli.main import app
from flatrock.data.catalog import load_data
from flatrock.diagnostics.ledger import Ledger

NPZ = (
    "data={name: npz, held_out: 60}",
    "model.num_classes=2",
    "data.augment={}",
    "train={epochs: 2, keep: {every: 1}}",
)
FEW = {
    "landscape": ("--images", "20", "--directions", "2", "--points", "3", "--attack", "pgd-2"),
    "curvature": ("--images", "40", "--steps", "4", "--top", "1", "--attack", "pgd-2"),
    "certify": ("--sigma", "0.1", "--limit", "4", "--n", "200"),
    "overfit": ("--images", "20", "--directions", "2", "--attack", "pgd-2"),
}
RECORDS = {"landscape": "landscape-*.json", "curvature": "curvature-*.json", "certify": "certificate-*.json"}


def flatrock(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, words), "--device", "cpu"])


def put(folder: Path, *, noise: float) -> Path:
    """As many points of the two moons in files; another noise makes others, with the same labels."""
    folder.mkdir()
    for split in ("train", "test"):
        data = load_data("moons", split, points=200, noise=noise)  # type: ignore[arg-type]
        np.savez(folder / f"{split}.npz", x=data.x.numpy(), label=data.y.numpy())
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data `own` and `other`, and a run on the former."""
    here = tmp_path_factory.mktemp("other_samples")
    own, _ = put(here / "own", noise=0.1), put(here / "other", noise=0.2)
    done = flatrock("train", "moons_at", *NPZ, "--data-dir", own, "--run-dir", here / "run")
    assert done.exit_code == 0, done.output
    return here


@pytest.fixture
def call(trained: Path, tmp_path: Path) -> Callable[..., Result]:
    """A command on a copy of the run, with one of the data."""
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    return lambda command, data, *more: flatrock(command, run, "--data-dir", trained / data, *FEW[command], *more)


def records(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.glob("run/*-*.json")}


@pytest.mark.parametrize("command", ["landscape", "curvature", "overfit"])
@pytest.mark.parametrize("on", ["train", "held_out"])
def test_training_samples_are_those_of_the_run(
    call: Callable[..., Result], tmp_path: Path, command: str, on: str
) -> None:
    done = call(command, "own", "--on", on)
    assert done.exit_code == 0, done.output
    before = records(tmp_path)
    assert before
    for more in ((), ("--fresh",) if command == "overfit" else ("--resume",)):
        refused = call(command, "other", "--on", on, *more)
        told = " ".join(refused.output.split())
        assert refused.exit_code == 2, refused.output
        assert f"is not the one {tmp_path / 'run'} was trained on" in told
        assert "give the data it was trained on (--data-dir)" in told
    assert records(tmp_path) == before


@pytest.mark.parametrize("command", ["landscape", "curvature", "certify"])
def test_a_record_of_other_test_samples_is_not_replaced_silently(
    call: Callable[..., Result], tmp_path: Path, command: str
) -> None:
    on = () if command == "certify" else ("--on", "test")
    on += ("--beta", "100") if command == "curvature" else ()
    assert "replaced" not in call(command, "own", *on).output
    again = call(command, "own", *on)
    assert again.exit_code == 0 and "replaced" not in again.output, again.output
    (file,) = tmp_path.glob(f"run/{RECORDS[command]}")
    before = file.read_bytes()
    refused = call(command, "other", *on, "--resume")
    assert refused.exit_code == 2, refused.output
    assert "is a record of something else (different: data)" in " ".join(refused.output.split())
    assert file.read_bytes() == before
    done = call(command, "other", *on)
    assert done.exit_code == 0, done.output
    assert "replaced the record of another measurement (different: data)" in " ".join(done.output.split())
    assert file.read_bytes() != before
    file.write_text("damaged")
    assert call(command, "other", *on).exit_code == 0, "without --resume it is measured again"


@pytest.mark.parametrize("command", ["landscape", "curvature", "certify"])
def test_a_replacement_that_was_stopped_goes_on(
    call: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Who began it without --resume has said that the record may go."""
    on = () if command == "certify" else ("--on", "test")
    on += ("--beta", "100") if command == "curvature" else ()
    assert call(command, "own", *on).exit_code == 0
    (file,) = tmp_path.glob(f"run/{RECORDS[command]}")
    before, put = file.read_bytes(), Ledger.put

    def stopped(self: Ledger, key: str, value: Mapping[str, Any]) -> None:
        put(self, key, value)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "put", stopped)
        assert call(command, "other", *on).exit_code == 130
    assert file.read_bytes() == before
    done = call(command, "other", *on, "--resume")
    assert done.exit_code == 0, done.output
    assert file.read_bytes() != before
    assert not list(tmp_path.glob("run/*.part"))


def test_what_is_computed_is_not_compared_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of the user's may round otherwise on another machine, and no --data-dir would cure that."""
    monkeypatch.chdir(tmp_path)
    code = "from torch import Tensor\n\nfrom flatrock.data.catalog import load_data\n\nSHARE = 1.0\n\n\n"
    code += "def make(split: str) -> tuple[Tensor, Tensor]:\n"
    code += "    data = load_data('moons', split, points=200)\n    return data.x * SHARE, data.y\n"
    (tmp_path / "mydata.py").write_text(code)
    words = ("data={name: 'mydata:make', held_out: 60}", *NPZ[1:], "--run-dir", tmp_path / "run")
    assert flatrock("train", "moons_at", *words).exit_code == 0
    (tmp_path / "mydata.py").write_text(code.replace("SHARE = 1.0", "SHARE = 1.0 - 1e-7"))
    done = flatrock("landscape", tmp_path / "run", *FEW["landscape"], "--on", "train")
    assert done.exit_code == 0, done.output


def test_pictures_of_another_folder_are_refused(trained: Path, tmp_path: Path) -> None:
    for place, value in (("own", 10), ("other", 12)):
        for i in range(40):
            file = tmp_path / place / "train" / "ab"[i % 2] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), value + 200 * (i % 2)).save(file)
    words = ("data={name: folder, channels: 1, held_out: 10}", "model={num_classes: 2, normalize: null}")
    more = ("data.augment={}", "train={epochs: 5, batch_size: 10}", "--data-dir", tmp_path / "own")
    done = flatrock("train", "digits_at", *words, *more, "--run-dir", tmp_path / "run")
    assert done.exit_code == 0, done.output
    refused = flatrock("landscape", tmp_path / "run", "--data-dir", tmp_path / "other", *FEW["landscape"])
    assert refused.exit_code == 2 and "is not the one" in refused.output, refused.output


def test_a_study_takes_up_no_record_of_other_test_samples(call: Callable[..., Result], tmp_path: Path) -> None:
    assert call("overfit", "own", "--on", "test").exit_code == 0
    before = records(tmp_path)
    refused = call("overfit", "other", "--on", "test")
    assert refused.exit_code == 2, refused.output
    assert "(different: data)" in refused.output and "--fresh" in refused.output
    assert records(tmp_path) == before
    done = call("overfit", "other", "--on", "test", "--fresh")
    assert done.exit_code == 0, done.output
    assert "replaced the record of another measurement (different: data)" in " ".join(done.output.split())


def test_a_run_of_an_old_version_does_not_tell_its_training_set(call: Callable[..., Result], tmp_path: Path) -> None:
    """So its samples are not refused, but a record of others is not replaced silently either."""
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    del told["provenance"]["training_set"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(told))
    assert call("landscape", "own").exit_code == 0
    assert "(different: data)" in call("landscape", "other", "--resume").output
    assert "replaced the record of another measurement" in " ".join(call("landscape", "other").output.split())


def test_several_runs_are_looked_at_before_any_is_measured(trained: Path, tmp_path: Path) -> None:
    """Two runs of one recipe, of which one was trained on other samples."""
    runs = [tmp_path / name for name in ("own", "other")]
    shutil.copytree(trained / "run", runs[0])
    done = flatrock("train", "moons_at", *NPZ, "--data-dir", trained / "other", "--run-dir", runs[1])
    assert done.exit_code == 0, done.output
    for command in ("landscape", "overfit"):
        done = flatrock(command, *runs, "--data-dir", trained / "own", *FEW[command])
        assert done.exit_code == 2, done.output
        assert f"is not the one {runs[1]} was trained on" in " ".join(done.output.split())
    assert not [file for run in runs for file in run.glob("landscape-*")]


def test_the_number_of_training_samples_is_that_of_the_run(call: Callable[..., Result]) -> None:
    refused = call("curvature", "other", "--on", "test")
    assert refused.exit_code == 2, refused.output
    told = " ".join(refused.output.split())
    assert "beta: npz training set" in told and "say --beta N, the number of its training samples" in told
