"""Several devices share the points of a weight landscape: the same numbers, interrupted or not; what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from command_cases import flatrock, refusal
from crew_cases import Linear, failures_over_there_are_told, weighed
from interrupted import Ends
from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.core.progress import Silent
from flatrock.core.rng import Seed
from flatrock.core.threat import Linf
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.probe import Probe
from flatrock.diagnostics.surface import Landscape
from flatrock.diagnostics.weight_landscape import MIDDLE, walk_weights
from flatrock.workflows.landscape import measure_landscape
from flatrock.workflows.landscape_plan import Plan

TWO = ["cpu", "cpu"]
PLANS = [
    Plan(points=3, directions=2, images=20, attack="pgd-2", batch_size=8),
    Plan(kind="weight-2d", points=3, images=20, attack="none"),
]


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    yield
    assert active_children() == []


def told(record: Landscape) -> dict[str, Any]:
    """A record without when and by how many it was made."""
    d: dict[str, Any] = json.loads(record.to_json())
    for name in ("time", "seconds", "measured", "devices"):
        d["provenance"].pop(name, None)
    return d


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.kind)
def test_the_same_as_on_one_device_to_the_last_digit(run: Path, plan: Plan) -> None:
    alone = measure_landscape(run / "last.safetensors", plan)[0]
    shared = measure_landscape(run / "last.safetensors", plan, device=TWO)[0]
    assert told(shared) == told(alone)
    assert shared.provenance["devices"] == TWO
    assert "devices" not in alone.provenance


def test_interrupted_it_goes_on_with_any_number_of_devices(run: Path) -> None:
    file, plan = run / "last.safetensors", PLANS[0]
    whole, target = measure_landscape(file, plan)
    target.unlink()
    with pytest.raises(KeyboardInterrupt):
        measure_landscape(file, plan, device=TWO, progress=Ends(2, KeyboardInterrupt))
    assert active_children() == []
    with pytest.raises(KeyboardInterrupt):
        measure_landscape(file, plan, resume=True, progress=Ends(1, KeyboardInterrupt))
    rest = measure_landscape(file, plan, device=TWO, resume=True)[0]
    assert 0 < rest.provenance["measured"] < rest.provenance["points"]
    assert told(rest) == told(whole)


def walked(model: nn.Module, *, devices: int = 2, samples: int = 8) -> Ledger:
    x = torch.rand(100, 2, generator=Seed(5).generator())[:samples]  # a view of more
    y, ids = torch.zeros(100).long()[:samples], torch.arange(100)[:samples]
    probe = Probe(model, x, y, ids=ids, threat=Linf(0.05), attack=None, seed=Seed(9), batch_size=4)
    ledger = Ledger(None, {}, resume=False)
    how: dict[str, Any] = {"count": 2, "dimensions": 1, "seed": Seed(1), "ledger": ledger, "progress": Silent()}
    walk_weights(model, probe, Axis(points=3, span=0.5), **how, devices=[torch.device("cpu")] * devices)
    return ledger


def test_samples_travel_alone_and_the_network_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, model = weighed(monkeypatch), Linear()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    many, few = walked(model), walked(model, samples=4)
    assert many.get(MIDDLE) != few.get(MIDDLE)
    assert len(sizes) == 2 * (2 + 5)
    assert sizes[0] - sizes[7] < 4 * (2 * 4 + 8 + 8) + 100, "four samples less: two numbers, a label and an id each"
    assert max(sizes[2:7]) < 500
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_more_devices_than_points_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = weighed(monkeypatch)
    assert len(walked(Linear(), devices=7)) == 5
    assert len(sizes) == 5 + 5, "orders and points"


def test_failures_over_there_are_told() -> None:
    failures_over_there_are_told(walked)


def test_devices_that_cannot_share_it_are_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "devices: got cpu, cpu, but an input landscape is quick and has one; name one"
    with pytest.raises(ConfigError, match=told):
        measure_landscape(run / "last.safetensors", Plan(kind="input", points=3, images=2), device=TWO)
    monkeypatch.chdir(tmp_path)
    before = sorted(run.iterdir())
    assert told in refusal(flatrock("landscape", run, "--kind", "input", "--device", "cpu,cpu"))
    assert "unknown device 'gpu7'" in refusal(flatrock("landscape", run, "--device", "cpu,gpu7"))
    assert sorted(run.iterdir()) == before


def test_the_command(run: Path) -> None:
    words = ("--points", "3", "--directions", "1", "--images", "10", "--attack", "none")
    done = flatrock("landscape", run, *words, "--device", "cpu,cpu")
    assert done.exit_code == 0, done.output
    (file,) = run.glob("landscape-best-*.json")
    assert Landscape.from_file(file).provenance["devices"] == TWO
