"""A measurement of curvature that was stopped goes on, ends the same, and is not confused with another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interrupted import stopped
from typer.testing import CliRunner, Result

from flatrock.cli.main import app
from flatrock.core.errors import StateError
from flatrock.diagnostics.curvature import Settings
from flatrock.diagnostics.curvature_record import CurvatureRecord
from flatrock.diagnostics.ledger import Ledger
from flatrock.engine.folder import OWN_FILE
from flatrock.workflows import curvature as module
from flatrock.workflows.curvature import Sampling, measure_curvature, planned_curvature

QUICK = Settings(probes=2, layers=False, runs=2, steps=4, top=2, awp_steps=1)
FEW = Sampling(images=20)
WORDS = ("--images", "20", "--probes", "2", "--no-layers", "--steps", "4", "--top", "2", "--awp-steps", "1")
# Two Lanczos runs, the whole network, AWP and SAM, of two losses.
PARTS = 10


@pytest.fixture(scope="module")
def whole(two_epochs: Path) -> dict[str, Any]:
    """What an uninterrupted measurement of the last epoch says."""
    record, file = measure_curvature(two_epochs / "last.safetensors", FEW, QUICK)
    file.unlink()
    return told(record)


@pytest.fixture
def run(two_epochs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(two_epochs, tmp_path / "tiny")


def told(record: CurvatureRecord) -> dict[str, Any]:
    """A record without when and how fast it was made."""
    values: dict[str, Any] = json.loads(record.to_json())
    for where, name in ((values["provenance"], "time"), (values["provenance"], "seconds")):
        where.pop(name)
    for found in values["losses"].values():
        found.pop("seconds")
    return values


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["curvature", *map(str, words), "--device", "cpu"])


def begin(run: Path, after: int = 3) -> Path:
    """The file of a measurement of the last epoch that was stopped."""
    with pytest.raises(KeyboardInterrupt), stopped(after):
        measure_curvature(run / "last.safetensors", FEW, QUICK)
    (part,) = run.glob("curvature-*.part")
    return part


@pytest.mark.parametrize("after", range(1, PARTS))
def test_a_measurement_stopped_anywhere_ends_the_same(run: Path, whole: dict[str, Any], after: int) -> None:
    part = begin(run, after)
    assert OWN_FILE.fullmatch(part.name)
    assert len(part.read_text().splitlines()) == 1 + after
    spent = sum(json.loads(line)["seconds"] for line in part.read_text().splitlines()[1:])
    made: list[str] = []

    def noted(ledger: Ledger, key: str, value: Any, put: Callable[..., None] = Ledger.put) -> None:
        made.append(key)
        put(ledger, key, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "put", noted)
        record, file = measure_curvature(run / "last.safetensors", FEW, QUICK, resume=True)
    assert told(record) == whole
    assert told(CurvatureRecord.from_json(file.read_bytes())) == whole
    assert len(made) == PARTS - after
    assert sum(found.seconds for found in record.losses.values()) > spent
    assert file == part.with_suffix(".json")
    assert not list(run.glob("*.part"))


def test_a_stop_before_the_record_is_written_loses_nothing(
    run: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CurvatureRecord, "to_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure_curvature(run / "last.safetensors", FEW, QUICK)
    monkeypatch.setattr(Ledger, "put", None)
    assert told(measure_curvature(run / "last.safetensors", FEW, QUICK, resume=True)[0]) == whole


def interrupted(*_: object) -> str:
    raise KeyboardInterrupt


def test_without_resume_nothing_is_lost(run: Path, whole: dict[str, Any]) -> None:
    part = begin(run, 7)
    kept = part.read_bytes()
    with pytest.raises(StateError, match="holds finished parts of a measurement that was stopped; go on with --resume"):
        measure_curvature(run / "last.safetensors", FEW, QUICK)
    assert part.read_bytes() == kept
    part.write_bytes(kept.splitlines()[0] + b"\n")  # nothing was finished
    assert told(measure_curvature(run / "last.safetensors", FEW, QUICK)[0]) == whole
    assert not part.exists()


@pytest.mark.parametrize(
    ("sampling", "settings", "beta", "fault"),
    [
        ({}, {"rho": 0.1}, None, "rho"),
        ({}, {"probes": 3, "gamma": 0.01}, None, "gamma, probes"),
        ({}, {}, 7, "beta"),
        ({"images": 30}, {}, None, "data, data_digest"),
        ({"seed": 1}, {}, None, "seed"),
        ({"attack": "fgsm"}, {}, None, "attack"),
        ({"batch_size": 7}, {}, None, "batch_size"),
        ({"precision": "double"}, {}, None, "precision"),
    ],
)
def test_other_settings_are_refused_and_nothing_is_deleted(
    run: Path,
    sampling: dict[str, Any],
    settings: dict[str, Any],
    beta: float | None,
    fault: str,
) -> None:
    part = begin(run)
    before = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    how = replace(FEW, **sampling), replace(QUICK, **settings)
    for ask in (measure_curvature, planned_curvature):
        with pytest.raises(StateError, match=rf"{part.name} belongs to another .*\(different: {fault}\); repeat its"):
            ask(run / "last.safetensors", *how, beta=beta, resume=True)
    assert {file: file.read_bytes() for file in run.iterdir() if file.is_file()} == before


def test_other_weights_and_another_device_are_refused(run: Path) -> None:
    begin(run)
    with pytest.raises(StateError, match=r"different: device\)"):
        planned_curvature(run / "last.safetensors", FEW, QUICK, device="cuda", resume=True)
    (part,) = run.glob("*.part")
    part.rename(run / part.name.replace("-last-", "-epoch-0001-"))
    with pytest.raises(StateError, match=r"different: weights_digest\)"):
        measure_curvature(run / "epoch-0001.safetensors", FEW, QUICK, resume=True)


def test_inputs_that_were_not_made_again_bit_by_bit_are_measured_anew(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, 7)
    craft, made = module.Crafted.__call__, []
    monkeypatch.setattr(module.Crafted, "__call__", lambda self, model: craft(self, model) + 1e-6)
    put = Ledger.put
    monkeypatch.setattr(Ledger, "put", lambda self, key, value: (made.append(key), put(self, key, value)))
    measure_curvature(run / "last.safetensors", FEW, QUICK, resume=True)
    assert len(made) == 5
    assert all(key.startswith("adversarial ") for key in made)


def test_a_finished_record_is_read_if_it_answers_the_question(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, file = measure_curvature(run / "last.safetensors", FEW, QUICK)
    before = file.read_bytes()
    file.with_suffix(".part").write_text("of a repetition that was stopped\n")
    with monkeypatch.context() as patch:
        patch.setattr(module, "curvature", None)
        assert measure_curvature(run / "last.safetensors", FEW, QUICK, resume=True) == (first, file)
        # Neither changes the question.
        other = replace(FEW, batch_size=7)
        assert measure_curvature(run / "last.safetensors", other, QUICK, resume=True) == (first, file)
        with pytest.raises(TypeError):
            measure_curvature(run / "last.safetensors", FEW, QUICK)
        with pytest.raises(TypeError):
            measure_curvature(run / "last.safetensors", FEW, replace(QUICK, rho=0.1))
    assert file.read_bytes() == before
    for name in ("weights_digest", "flatrock"):
        for part in run.glob("*.part"):
            part.unlink()
        values = json.loads(before)
        values["provenance"][name] = "another"
        file.write_text(json.dumps(values))
        record = measure_curvature(run / "last.safetensors", FEW, QUICK, resume=True)[0]
        assert told(record) == told(first)
        assert told(CurvatureRecord.from_json(file.read_bytes())) == told(first)
    values = json.loads(before)
    values["provenance"]["data_digest"] = "another"
    file.write_text(json.dumps(values))
    with pytest.raises(StateError, match=r"a record of something else \(different: data\)"):
        measure_curvature(run / "last.safetensors", FEW, QUICK, resume=True)
    # One of an older version does not tell its samples.
    del values["provenance"]["data_digest"]
    file.write_text(json.dumps(values))
    assert told(measure_curvature(run / "last.safetensors", FEW, QUICK, resume=True)[0]) == told(first)


def test_the_command_goes_on_where_it_was_stopped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (run, "--which", "epoch-1,last", *WORDS)
    with stopped(PARTS + 4):
        done = call(*words)
    assert done.exit_code == 130, done.output
    assert "the same command with --resume goes on from the last finished part" in " ".join(done.output.split())
    (finished,), (part,) = run.glob("curvature-*.json"), run.glob("curvature-*.part")
    assert "-epoch-0001-" in finished.name
    assert "-last-" in part.name
    before, begun = finished.read_bytes(), part.read_bytes()

    other = call(*words, "--rho", "0.1", "--resume")
    assert other.exit_code == 2
    assert "belongs to another measurement (different: rho)" in " ".join(other.output.split())
    assert [f.read_bytes() for f in (finished, part)] == [before, begun]
    assert len(list(run.glob("curvature-*"))) == 2, "refused before anything was measured"

    measured, tasks = module.curvature, []
    monkeypatch.setattr(module, "curvature", lambda *a, **k: (tasks.append(k["task"]), measured(*a, **k))[1])
    again = call(*words, "--resume")
    assert again.exit_code == 0, again.output
    assert tasks == ["tiny/last, clean loss", "tiny/last, adversarial loss"]
    assert finished.read_bytes() == before
    assert not part.exists()
    words_of = again.output.replace("\n", "")
    assert f"read {finished}, which was measured before" in words_of
    assert f"wrote {part.with_suffix('.json')}" in words_of
    rest = told(CurvatureRecord.from_json(part.with_suffix(".json").read_bytes()))
    assert rest == told(measure_curvature(run / "last.safetensors", FEW, QUICK)[0])


WORKER = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from flatrock.diagnostics.curvature import Settings
from flatrock.workflows.curvature import Sampling, measure_curvature
settings = Settings(probes=2, layers=False, runs=6, steps=4, top=2, awp_steps=1)
measure_curvature(Path(sys.argv[1]), Sampling(images=20), settings)
"""


def test_a_killed_measurement_loses_at_most_one_part(run: Path, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    begun = subprocess.Popen([sys.executable, str(worker), str(run / "best.safetensors")])
    deadline = time.monotonic() + 60
    parts: list[Path] = []
    while time.monotonic() < deadline and not (parts and len(parts[0].read_text().splitlines()) > 3):
        time.sleep(0.01)
        parts = list(run.glob("curvature-best-*.part"))
    os.kill(begun.pid, signal.SIGKILL)
    assert begun.wait() == -signal.SIGKILL
    lines = parts[0].read_text().splitlines()
    assert 3 < len(lines) < 1 + 18
    settings = replace(QUICK, runs=6, steps=4)
    record, file = measure_curvature(run / "best.safetensors", FEW, settings, resume=True)
    assert not parts[0].exists()
    file.unlink()
    assert told(measure_curvature(run / "best.safetensors", FEW, settings)[0]) == told(record)
