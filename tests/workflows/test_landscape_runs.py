"""From runs to landscapes: what is stored, going on after a kill, images chosen by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own_cases import METHODS, among_methods

from flatrock.attacks.craft import craft
from flatrock.attacks.gradient import GradientAttack
from flatrock.core.errors import ConfigError
from flatrock.core.files import sha256
from flatrock.core.rng import Seed
from flatrock.core.threat import Linf
from flatrock.data.split import fair_subset
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.surface import Landscape
from flatrock.engine.folder import OWN_FILE
from flatrock.recipes.load import load_recipe
from flatrock.recipes.part import data_part
from flatrock.recipes.restore import load
from flatrock.workflows.landscape import measure_landscape
from flatrock.workflows.landscape_plan import Plan
from flatrock.workflows.train import train_recipe

QUICK: dict[str, Any] = {"points": 3, "directions": 2, "images": 20, "attack": "pgd-2"}


def told(record: Landscape) -> dict[str, Any]:
    """A record without the moment it was made."""
    d: dict[str, Any] = json.loads(record.to_json())
    for name in ("time", "seconds", "measured"):
        d["provenance"].pop(name)
    return d


def test_the_middle_of_a_landscape_is_the_adversarial_loss_of_the_run(run: Path) -> None:
    record, file = measure_landscape(run / "best.safetensors", Plan(**QUICK))
    assert file.parent == run
    assert OWN_FILE.fullmatch(file.name)
    assert not list(run.glob("*.part")), "what was kept for resumption goes"
    model = load(run)
    data = fair_subset(data_part(load_recipe("digits_at", {"data.limit": 512}), "train"), 20)
    x, y = data.images(torch.arange(20)), data.y
    gen = Seed(0).child("landscape").child("attack").samples(data.ids)
    x_adv = craft(GradientAttack(steps=2), model, x, y, Linf(0.2), gen)
    with torch.no_grad():
        loss = F.cross_entropy(model(x_adv), y, reduction="none").double().mean()
    assert record.middle == pytest.approx(float(loss), rel=1e-9)
    assert np.all(record.loss[:, 1] == record.middle)
    assert record.loss.shape == (2, 3)
    assert record.attack["name"] == "pgd-2"
    assert record.attack["step_size"] == pytest.approx(0.05)
    assert record.provenance["data"] == "digits train, 20 of 512 samples"
    assert record.provenance["checkpoint"] == "best.safetensors"
    assert Landscape.from_json(file.read_text()).to_json() == record.to_json()


def test_the_same_question_has_the_same_answer_and_another_seed_another(run: Path) -> None:
    first = measure_landscape(run / "last.safetensors", Plan(**QUICK))[0]
    again = measure_landscape(run / "last.safetensors", Plan(**QUICK))[0]
    other = measure_landscape(run / "last.safetensors", Plan(**QUICK, seed=1))[0]
    assert told(first) == told(again)
    assert not np.allclose(first.loss[:, 0], other.loss[:, 0])


@pytest.mark.parametrize("plan", [Plan(**QUICK), Plan(kind="input", points=5, images=2)])
def test_a_stopped_measurement_goes_on_and_ends_the_same(
    run: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, file = measure_landscape(run / "last.safetensors", plan)
    file.unlink()
    put, calls = Ledger.put, 0

    def stops(self: Ledger, key: str, value: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        put(self, key, value)

    monkeypatch.setattr(Ledger, "put", stops)
    with pytest.raises(KeyboardInterrupt):
        measure_landscape(run / "last.safetensors", plan)
    monkeypatch.setattr(Ledger, "put", put)
    assert len(list(run.glob("landscape-last-*.part"))) == 1
    rest = measure_landscape(run / "last.safetensors", plan, resume=True)[0]
    assert rest.provenance["measured"] == rest.provenance["points"] - 3
    assert told(rest) == told(whole)
    assert not list(run.glob("*.part"))


WORKER = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from flatrock.workflows.landscape import measure_landscape
from flatrock.workflows.landscape_plan import Plan
plan = Plan(points=21, directions=4, images=40, attack="pgd-3")
measure_landscape(Path(sys.argv[1]), plan, resume="resume" in sys.argv)
"""


def test_a_killed_measurement_loses_at_most_one_point(run: Path, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    begun = subprocess.Popen([sys.executable, str(worker), str(run / "best.safetensors")])
    deadline = time.monotonic() + 60
    parts: list[Path] = []
    while time.monotonic() < deadline and not (parts and len(parts[0].read_text().splitlines()) > 6):
        time.sleep(0.01)
        parts = list(run.glob("landscape-best-*-d4-*.part"))
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait()
    kept = len(parts[0].read_text().splitlines()) - 1
    assert kept >= 6
    plan = Plan(points=21, directions=4, images=40, attack="pgd-3")
    measured = measure_landscape(run / "best.safetensors", plan, resume=True)[0]
    assert measured.provenance["measured"] in (81 - kept, 82 - kept), "the last line may be half written"
    (run / f"{plan.stem('best')}.json").unlink()
    assert told(measure_landscape(run / "best.safetensors", plan)[0]) == told(measured)


def test_resuming_a_finished_landscape_reads_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, file = measure_landscape(run / "best.safetensors", Plan(**QUICK))
    monkeypatch.setattr("flatrock.workflows.landscape._walked", None)
    assert measure_landscape(run / "best.safetensors", Plan(**QUICK), resume=True)[0].to_json() == first.to_json()
    # The name tells neither batch size nor weights; the content does.
    with pytest.raises(TypeError):
        measure_landscape(run / "best.safetensors", Plan(**QUICK, batch_size=7), resume=True)
    assert file.is_file()


def test_a_landscape_does_not_go_on_with_other_code_of_an_attack(run: Path, tmp_path: Path) -> None:
    plan, weights = {**QUICK, "attack": "mymethods:climb-2"}, run / "best.safetensors"
    with among_methods(tmp_path) as methods:
        first = measure_landscape(weights, Plan(**plan))[0]
        assert first.identity["code"] == {"file": "mymethods.py", "sha256": sha256(METHODS)}
        assert measure_landscape(weights, Plan(**plan), resume=True)[0].to_json() == first.to_json()
        stronger = METHODS.replace("range(steps)", "range(steps + 2)")
        methods.write_text(stronger)
        again = measure_landscape(weights, Plan(**plan), resume=True)[0]
        assert again.identity["code"]["sha256"] == sha256(stronger)
        assert again.middle > first.middle
    assert "code" not in measure_landscape(weights, Plan(**QUICK))[0].identity


def test_input_landscapes_know_their_images(run: Path) -> None:
    plan = Plan(kind="input", points=3, images=2)
    record = measure_landscape(run / "best.safetensors", plan)[0]
    assert record.axis == (-0.2, 0.0, 0.2), "as far as the threat reaches"
    ids = tuple(int(s["id"]) for s in record.samples)
    chosen = measure_landscape(run / "best.safetensors", Plan(kind="input", points=3, ids=ids[::-1]))[0]
    assert np.allclose(chosen.loss[::-1], record.loss, rtol=1e-5)
    assert [s["id"] for s in chosen.samples] == list(ids[::-1])
    with pytest.raises(ConfigError, match=r"no samples \[99999\]"):
        measure_landscape(run / "best.safetensors", Plan(kind="input", points=3, ids=(99999,)))


def test_a_network_without_batchnorm(tmp_path: Path) -> None:
    done = train_recipe("moons_at", folder=tmp_path / "moons", device="cpu", train={"epochs": 1})
    record = measure_landscape(done.folder / "last.safetensors", Plan(**QUICK))[0]
    assert np.isfinite(record.loss).all()
    assert record.moved["tensors"] == 3


def test_overwriting_a_run_removes_its_landscapes(tmp_path: Path) -> None:
    folder = tmp_path / "moons"
    for _ in range(2):
        train_recipe("moons_at", folder=folder, device="cpu", overwrite=True, train={"epochs": 1})
        assert not list(folder.glob("landscape-*"))
        measure_landscape(folder / "last.safetensors", Plan(**QUICK))
        assert len(list(folder.glob("landscape-*"))) == 1
