"""Parts that are kept: made once, read back exactly, and a measurement stopped after any of them ends the same."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from curvature_cases import dense_net, samples
from interrupted import stopped
from torch import Tensor, nn

from flatrock.core.progress import Silent
from flatrock.diagnostics import exact as exact_module
from flatrock.diagnostics.curvature import Curvature, Settings, curvature
from flatrock.diagnostics.kept import Kept
from flatrock.diagnostics.ledger import Ledger

QUICK = Settings(probes=2, runs=2, steps=4, top=2, awp_steps=2)
# Lanczos runs, strips of 16 rows or the whole and its layers, AWP, SAM.
PARTS = {"exact": 2 + 9 + 2, "hutch++": 2 + 4 + 2, "hutchinson": 2 + 4 + 2}


class Bar(Silent):
    """Where a bar begins and how far it comes."""

    def __init__(self) -> None:
        self.total = self.before = self.after = 0

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.total, self.before, self.after = total, done, done

    def advance(self, units: int, note: str = "") -> None:
        self.after += units


def measured(kept: Kept, *, trace: str = "hutch++", progress: Bar | None = None) -> Curvature:
    net, (x, y) = dense_net(), samples((3,), 3)

    def attack(model: nn.Module) -> Tensor:
        return (x + 0.02 * model(x).detach().argmax(1, keepdim=True)).clamp(0, 1)

    settings = replace(QUICK, trace=trace)
    return curvature(net, x, y, beta=24, settings=settings, attack=attack, progress=progress, kept=kept)


def test_what_is_kept_is_read_and_not_made_again(tmp_path: Path) -> None:
    file, value = tmp_path / "a.part", {"pi": math.pi, "third": [1 / 3, 5e-324, None]}
    first = Kept(Ledger(file, {}, resume=False), "mine ")
    assert "x" not in first
    assert first("x", lambda: value, write=dict, read=dict) is value
    assert first.seconds == 0
    again = Kept(Ledger(file, {}, resume=True), "mine ")
    assert "x" in again
    assert again("x", lambda: pytest.fail("made again"), write=dict, read=dict) == value
    assert again.seconds > 0
    assert "x" not in Kept(Ledger(file, {}, resume=True), "other ")


def test_without_a_ledger_nothing_is_found() -> None:
    made: list[int] = []
    for i in range(2):
        assert "x" not in Kept()
        Kept()("x", lambda i=i: made.append(i) or i, write=str, read=int)
    assert made == [0, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_kept(tmp_path: Path, value: float) -> None:
    kept = Kept(Ledger(tmp_path / "a.part", {}, resume=False))
    found = kept("x", lambda: [value], write=list, read=list)
    assert found[0] is value
    assert "x" not in kept
    assert not (tmp_path / "a.part").exists()


@pytest.mark.parametrize(("trace", "after"), [(trace, k) for trace, n in PARTS.items() for k in range(n + 1)])
def test_a_measurement_stopped_anywhere_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: str, after: int
) -> None:
    monkeypatch.setattr(exact_module, "KEPT", 16)
    file, bar, last = tmp_path / "a.part", Bar(), after == PARTS[trace]
    whole = measured(Kept(), trace=trace)
    with stopped(after):
        if last:
            measured(Kept(Ledger(file, {}, resume=False)), trace=trace)
        else:
            with pytest.raises(KeyboardInterrupt):
                measured(Kept(Ledger(file, {}, resume=False)), trace=trace)
    ledger = Ledger(file, {}, resume=True)
    assert len(ledger) == after
    kept = Kept(ledger)
    rest = measured(kept, trace=trace, progress=bar)
    assert replace(rest, seconds=0.0) == replace(whole, seconds=0.0)
    assert rest.seconds > kept.seconds >= 0
    assert len(ledger) == PARTS[trace]
    assert bar.after == bar.total == rest.products * 24
    assert (bar.before == 0) == (after == 0)
    assert (bar.before == bar.total) == last


def test_strips_of_any_length_are_the_same_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(Kept(), trace="exact")
    monkeypatch.setattr(exact_module, "KEPT", 16)
    strips = measured(Kept(), trace="exact")
    assert replace(strips, seconds=0.0) == replace(whole, seconds=0.0)
