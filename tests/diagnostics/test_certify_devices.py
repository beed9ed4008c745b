"""Several devices share a certification: the same votes as from one, whoever counts them; failures are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from crew_cases import failures_over_there_are_told, weighed
from interrupted import stopped
from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.core.progress import Silent
from flatrock.diagnostics import certify as module
from flatrock.diagnostics.certificate import Certificate
from flatrock.diagnostics.certify import certify
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.smoothing import Smoothing

TWO = ["cpu", "cpu"]
QUICK = Smoothing(sigma=0.25, n0=20, n=300, alpha=0.01)
Ask = Callable[..., Certificate]


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    yield
    assert active_children() == []


@pytest.fixture(scope="module")
def ask(digits: Any, digits_model: nn.Module) -> Ask:
    x, y, ids = digits.test_x[:6], digits.test_y[:6], torch.tensor([9, 2, 40, 3, 0, 17])
    return partial(certify, digits_model, x, y, QUICK, ids=ids, batch_size=64, seed=3)


@pytest.fixture(scope="module")
def alone(ask: Ask) -> Certificate:
    return ask()


def same(a: Certificate, b: Certificate) -> None:
    for name in ("top", "counts", "radii", "predictions", "labels", "ids", "right"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.shape, a.smoothing, a.accuracy, a.abstained) == (b.shape, b.smoothing, b.accuracy, b.abstained)


class Listener(Silent):
    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int]] = []
        self.units: list[int] = []
        self.notes: list[str] = []
        self.ended = 0

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.begun.append((task, total, done))

    def advance(self, units: int, note: str = "") -> None:
        self.units.append(units)
        self.notes.append(note)

    def end(self) -> None:
        self.ended += 1


def test_the_same_as_on_one_device(ask: Ask, alone: Certificate, digits_model: nn.Module) -> None:
    before = {name: value.clone() for name, value in digits_model.state_dict().items()}
    state, listener = torch.get_rng_state(), Listener()
    shared = ask(device=TWO, progress=listener)
    same(alone, shared)
    assert shared.certified(0.1) > 0 and len(set(shared.counts.flatten().tolist())) > 5, "votes that say something"
    assert shared.provenance == {"batch_size": 64, "devices": TWO}
    assert alone.provenance == {"batch_size": 64}
    assert listener.begun == [("certifying", 6 * 320, 0)]
    assert (sum(listener.units), listener.ended) == (6 * 320, 1)
    assert len(listener.units) == 6 * 6, "one word for each batch: 20 votes, then 300 in batches of 64"
    assert listener.notes[0] == "sample 1 of 6"
    assert listener.notes == sorted(listener.notes), "the count of finished ones only grows"
    assert all(torch.equal(value, before[name]) for name, value in digits_model.state_dict().items())
    assert all(p.requires_grad for p in digits_model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sample_travels_alone(ask: Ask, alone: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    """These are views of 400 samples; each that is sent has 64 numbers."""
    sizes = weighed(monkeypatch)
    same(alone, ask(device=TWO))
    assert len(sizes) == 2 + 6
    assert max(sizes[2:]) < 64 * 4 + 1000


def test_a_named_device_is_where_the_model_goes_and_comes_back_from(ask: Ask, alone: Certificate) -> None:
    found = ask(device="cpu")
    same(alone, found)
    assert found.provenance == alone.provenance


def test_interrupted_it_goes_on_with_any_number_of_devices(ask: Ask, alone: Certificate, tmp_path: Path) -> None:
    part, listener = tmp_path / "a.part", Listener()
    with pytest.raises(KeyboardInterrupt), stopped(2):
        ask(device=TWO, ledger=Ledger(part, {"a": 1}, resume=False))
    assert active_children() == []
    assert len(part.read_text().splitlines()) == 3
    with pytest.raises(KeyboardInterrupt), stopped(1):
        ask(ledger=Ledger(part, {"a": 1}, resume=True))
    ledger = Ledger(part, {"a": 1}, resume=True)
    assert len(ledger) == 3
    same(alone, ask(device=TWO, ledger=ledger, progress=listener))
    assert listener.begun == [("certifying", 6 * 320, 3 * 320)]
    assert sum(listener.units) == 3 * 320, "what was on disk was not computed again"
    assert len(part.read_text().splitlines()) == 7


def test_no_more_processes_than_samples(ask: Ask, alone: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def counted(begin: Any, orders: bytes, devices: list[torch.device]) -> Any:
        begun.append(len(devices))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "workers", counted)
    with pytest.raises(KeyboardInterrupt), stopped(100):
        ask(device=["cpu"] * 9)
    assert begun == [6]
    ledger = Ledger(None, {}, resume=False)
    for i in range(5):
        ledger.put(str(int(alone.ids[i])), {"top": int(alone.top[i]), "counts": alone.counts[i].tolist(), "seconds": 0})
    same(alone, ask(device=TWO, ledger=ledger))
    same(alone, ask(device=TWO, ledger=ledger))
    assert begun == [6], "the last one is certified here, and then there is nothing left to do"


def simple(model: nn.Module, ledger: Ledger | None = None) -> Certificate:
    x = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    return certify(model, x, torch.tensor([0, 1, 0, 1]), QUICK, device=TWO, ledger=ledger)


def test_failures_over_there_are_told() -> None:
    failures_over_there_are_told(simple)


def test_devices_that_do_not_exist(ask: Ask) -> None:
    with pytest.raises(ConfigError, match="unknown device 'gpu7'"):
        ask(device=["cpu", "gpu7"])
    with pytest.raises(ConfigError, match="no device is named"):
        ask(device=[])


@pytest.mark.gpu
def test_two_processes_on_one_gpu(ask: Ask) -> None:
    one, two = ask(device="cuda"), ask(device=["cuda:0", "cuda:0"])
    assert torch.equal(one.top, two.top)
    assert int((one.counts - two.counts).abs().sum()) <= 4, "kernels may round otherwise"
