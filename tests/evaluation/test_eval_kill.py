"""A killed evaluation goes on from its last chunk, and ends as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

ATTACKS = ["fgsm", "pgd-10", "cw-10:restarts=2", "mt-5"]
Order = Callable[..., int]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Order]:
    """Sends an order to a process that forks children for it."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("eval_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def send(**order: Any) -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"attacks": ATTACKS, "resume": False, **order}) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    yield send
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def uninterrupted(worker: Order, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whole")
    assert worker(journal=str(folder / "j"), answer=str(folder / "answer")) == 0
    whole = torch.load(folder / "answer", weights_only=True)
    assert 0 < int(whole["flags"]["pgd-10"].sum()) < int(whole["flags"]["clean"].sum()), "some fall, some stand"
    return whole


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b)


@pytest.mark.parametrize("trial", range(5))
def test_killed_and_resumed_equals_uninterrupted(worker: Order, uninterrupted: Any, tmp_path: Path, trial: int) -> None:
    draw = Random(trial)
    journal, answer = tmp_path / "j", tmp_path / "answer"
    kills = sorted(draw.sample(range(1, 20), 3))
    for i, chunks in enumerate(kills):
        later = draw.random() * 0.01
        worker(journal=str(journal), answer=str(answer), resume=i > 0, chunks=chunks, later=later)
        assert not answer.exists(), "killed before the end"
    assert worker(journal=str(journal), answer=str(answer), resume=True) == 0
    assert same(torch.load(answer, weights_only=True), uninterrupted)


def test_what_is_on_disk_is_not_computed_again(worker: Order, uninterrupted: Any, tmp_path: Path) -> None:
    journal, answer = tmp_path / "j", tmp_path / "answer"
    worker(journal=str(journal), answer=str(answer), chunks=9, later=0.0)
    before = {p.name: p.stat().st_mtime_ns for p in journal.glob("chunk-*.safetensors")}
    assert len(before) >= 9
    assert worker(journal=str(journal), answer=str(answer), resume=True) == 0
    after = {p.name: p.stat().st_mtime_ns for p in journal.glob("chunk-*.safetensors")}
    assert {k: after[k] for k in before} == before


def test_without_resume_nothing_is_lost(worker: Order, uninterrupted: Any, tmp_path: Path) -> None:
    journal, answer = tmp_path / "j", tmp_path / "answer"
    worker(journal=str(journal), answer=str(answer), chunks=5, later=0.0)
    (journal / "chunk-000001.safetensors").write_bytes(b"damaged")
    assert worker(journal=str(journal), answer=str(answer)) != 0
    assert worker(journal=str(journal), answer=str(answer), resume=True) == 0
    assert same(torch.load(answer, weights_only=True), uninterrupted)
