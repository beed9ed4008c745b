"""From runs to landscapes: what is stored, going on after a kill, which checkpoint is meant, bad input, the command."""

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
from typer.testing import CliRunner, Result

from flatrock.attacks.craft import craft
from flatrock.attacks.gradient import GradientAttack
from flatrock.cli.main import app
from flatrock.core.errors import ConfigError, FlatrockError, StateError
from flatrock.core.rng import Seed
from flatrock.core.threat import L2, Linf
from flatrock.data.split import fair_subset
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.surface import Landscape
from flatrock.engine.folder import OWN_FILE
from flatrock.recipes.checkpoints import checkpoints
from flatrock.recipes.landscape import measure_landscape
from flatrock.recipes.landscape_plan import Plan
from flatrock.recipes.load import load_recipe
from flatrock.recipes.part import data_part
from flatrock.recipes.restore import load
from flatrock.recipes.train import train_recipe

QUICK: dict[str, Any] = {"points": 3, "directions": 2, "images": 20, "attack": "pgd-2"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few epochs of AT on digits; epochs 1, 2 and 3 are kept."""
    folder = tmp_path_factory.mktemp("landscapes") / "tiny"
    train_recipe(
        "digits_at",
        folder=folder,
        device="cpu",
        data={"limit": 512},
        train={"epochs": 3, "batch_size": 64, "keep": {"every": 1}},
        attack={"steps": 2},
        select={"size": 40},
    )
    return folder


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
from flatrock.recipes.landscape import measure_landscape
from flatrock.recipes.landscape_plan import Plan
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
    monkeypatch.setattr("flatrock.recipes.landscape._walked", None)
    assert measure_landscape(run / "best.safetensors", Plan(**QUICK), resume=True)[0].to_json() == first.to_json()
    # The name tells neither batch size nor weights; the content does.
    with pytest.raises(TypeError):
        measure_landscape(run / "best.safetensors", Plan(**QUICK, batch_size=7), resume=True)
    assert file.is_file()


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


def test_the_edge_of_an_l2_threat() -> None:
    plan = Plan(kind="input")
    assert plan.axis(L2(0.8), 64).span == pytest.approx(0.1), "0.1 in each of 64 pixels has length 0.8"
    assert plan.axis(Linf(0.1), 64).span == 0.1
    assert Plan(kind="input", span=0.3).axis(Linf(0.1), 64).span == 0.3
    with pytest.raises(ConfigError, match="eps 0"):
        plan.axis(Linf(0.0), 64)


def test_a_network_without_batchnorm(tmp_path: Path) -> None:
    done = train_recipe("moons_at", folder=tmp_path / "moons", device="cpu", train={"epochs": 1})
    record = measure_landscape(done.folder / "last.safetensors", Plan(**QUICK))[0]
    assert np.isfinite(record.loss).all()
    assert record.moved["tensors"] == 3


# Which checkpoints


def test_names_of_checkpoints(run: Path) -> None:
    def names(*which: str) -> list[str]:
        return [file.stem for file in checkpoints(run, which)]

    assert names("auto") == ["best"]
    assert names("last", "epoch-2", "epoch-0002") == ["last", "epoch-0002"]
    assert names("kept", "best") == ["epoch-0001", "epoch-0002", "epoch-0003", "best"]
    assert checkpoints(run / "epoch-0001.safetensors", ["best"]) == [run / "epoch-0001.safetensors"]


def test_checkpoints_that_are_not_there(run: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"keeps no epoch-7 \(kept: 1, 2, 3\)"):
        checkpoints(run, ["epoch-7"])
    with pytest.raises(StateError, match="no averaged weights"):
        checkpoints(run, ["average-best"])
    with pytest.raises(ConfigError, match="did you mean"):
        checkpoints(run, ["bset"])
    with pytest.raises(StateError, match="there is no run folder"):
        checkpoints(tmp_path / "nowhere")
    bare = tmp_path / "bare"
    bare.mkdir()
    with pytest.raises(StateError, match=r"no run\.json"):
        checkpoints(bare, ["kept"])
    short = tmp_path / "short"
    train_recipe("moons_at", folder=short, device="cpu", train={"epochs": 1})
    with pytest.raises(StateError, match=r"train\.keep\.every=N"):
        checkpoints(short, ["kept"])
    (short / "epoch-0001.safetensors").write_bytes((run / "epoch-0001.safetensors").read_bytes())
    with pytest.raises(StateError, match="belongs to another run"):
        checkpoints(short, ["epoch-1"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "weight-3d"}, "unknown landscape kind"),
        ({"points": 4}, "odd number"),
        ({"span": 0.0}, "above 0"),
        ({"directions": 0}, "directions must be a whole number"),
        ({"images": 0}, "images must be a whole number"),
        ({"on": "validation"}, "unknown landscape on"),
        ({"attack": "pdg-10"}, "did you mean"),
        ({"precision": "bf16"}, "unknown landscape precision"),
        ({"ids": (1,)}, "has no ids"),
        ({"kind": "input", "directions": 3}, "has no directions"),
        ({"kind": "input", "attack": "pgd-10"}, "has no attack"),
        ({"kind": "input", "ids": (1,), "images": 3}, "keep one"),
    ],
)
def test_nonsense_plans_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FlatrockError, match=message):
        Plan(**options)


def test_names_of_files_tell_landscapes_apart() -> None:
    plans = [
        Plan(),
        Plan(span=0.5),
        Plan(points=11),
        Plan(directions=3),
        Plan(on="test"),
        Plan(images=7),
        Plan(attack="pgd-10:step_size=2/255"),
        Plan(attack="none"),
        Plan(seed=1),
        Plan(kind="weight-2d"),
        Plan(kind="input"),
        Plan(kind="input", ids=(3, 4)),
    ]
    stems = {plan.stem("best") for plan in plans}
    assert len(stems) == len(plans)
    assert all(OWN_FILE.fullmatch(f"{stem}.json") and OWN_FILE.fullmatch(f"{stem}.part") for stem in stems)


# The command


def flatrock(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(w) for w in words])


FEW = ("--points", "3", "--images", "20", "--attack", "pgd-2", "--device", "cpu")


def test_the_command_draws_checkpoints_at_one_scale_and_records_again(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "figure"
    done = flatrock("landscape", run, "--which", "last,epoch-1", "--directions", "2", *FEW, "--out", out)
    assert done.exit_code == 0, done.output
    assert "epoch-0001" in done.output
    assert "rise at 0.5" in done.output
    assert "epoch-0001 minus last: rise at 0.5" in done.output
    assert {file.name for file in tmp_path.iterdir()} == {"figure.png", "figure.svg", "figure.html"}
    records = [Path(line.removeprefix("wrote ")) for line in done.output.splitlines() if line.startswith("wrote ")]
    again = flatrock("landscape", *records, "--out", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "figure.svg").read_bytes()


@pytest.mark.parametrize("kind", ["weight-2d", "input"])
def test_the_command_draws_surfaces(run: Path, tmp_path: Path, kind: str) -> None:
    words = ("--points", "3", "--images", "2", "--device", "cpu", "--out", tmp_path / "figure")
    done = flatrock("landscape", run, "--kind", kind, *words)
    assert done.exit_code == 0, done.output
    assert "mean |rise|" in done.output
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--which", "epoch-9"), "keeps no epoch-9"),
        (("--points", "10"), "odd number"),
        (("--radius", "2"), "radius must lie in (0, 1]"),
        (("--radius", "x"), "expected a number"),
        (("--ids", "1,b", "--kind", "input"), "whole numbers"),
        (("--span", "1/0"), "divides by zero"),
        (("--device", "tpu"), "unknown device"),
    ],
)
def test_the_command_refuses_in_one_line(run: Path, words: tuple[str, ...], message: str) -> None:
    done = flatrock("landscape", run, *words)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


def test_records_of_different_questions_are_not_overlaid(run: Path) -> None:
    files = [measure_landscape(run / "best.safetensors", Plan(**{**QUICK, "points": n}))[1] for n in (3, 5)]
    done = flatrock("landscape", *files)
    assert done.exit_code == 2
    assert "different axis are not drawn at one scale: 3 points to 1 and 5 points to 1" in done.output
    other = flatrock("landscape", files[0], "--kind", "input")
    assert "say --kind weight-1d" in other.output
    assert "there is no landscape" in flatrock("landscape", run / "none.json").output


def test_overwriting_a_run_removes_its_landscapes(tmp_path: Path) -> None:
    folder = tmp_path / "moons"
    for _ in range(2):
        train_recipe("moons_at", folder=folder, device="cpu", overwrite=True, train={"epochs": 1})
        assert not list(folder.glob("landscape-*"))
        measure_landscape(folder / "last.safetensors", Plan(**QUICK))
        assert len(list(folder.glob("landscape-*"))) == 1
