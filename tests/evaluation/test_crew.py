"""Several devices share an evaluation: the same result, in whatever order batches end; failures are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from crew_cases import Cramped, Linear, failures_over_there_are_told, served, weighed
from interrupted import Ends
from torch import Tensor, nn

from flatrock.attacks.gradient import GradientAttack
from flatrock.core.errors import ConfigError
from flatrock.core.records import Result
from flatrock.core.rng import Seed
from flatrock.core.threat import Linf
from flatrock.evaluation import crew as crew_module
from flatrock.evaluation.crew import Crew, crew
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.fast_model import Counted
from flatrock.evaluation.journal import Chunk
from flatrock.evaluation.plans import Step
from flatrock.models.catalog import create_model

CPU = torch.device("cpu")
ATTACKS = ["fab:steps=3", "fast", "pgd-3:restarts=2"]


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    yield
    assert active_children() == []


def same(a: Result, b: Result) -> None:
    for name in ("flags", "margins", "distances"):
        one, other = getattr(a, name), getattr(b, name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[k], other[k]) for k in one), name
    assert a.adversarial is not None and b.adversarial is not None
    assert torch.equal(a.adversarial, b.adversarial)
    for label, cost in a.costs.items():
        counted = {k: v for k, v in cost.items() if k != "seconds"}
        assert counted == {k: v for k, v in b.costs[label].items() if k != "seconds"}


Ask = Callable[..., Result]


@pytest.fixture(scope="module")
def ask(digits: Any, digits_model: nn.Module) -> Ask:
    """A plan, distances, transfers, ids of one's own; 4 batches at most of each."""
    x, y, other = digits.test_x[:16], digits.test_y[:16], create_model("digits_cnn", seed=9)
    asked = {"attacks": ATTACKS, "surrogate": other, "ids": torch.arange(16).flip(0), "batch_size": 4, "seed": 3}
    return partial(evaluate, digits_model, x, y, Linf(0.1), **asked, keep_adversarial=True, device="cpu")


@pytest.fixture(scope="module")
def alone(ask: Ask) -> Result:
    return ask()


def test_the_same_as_on_one_device(ask: Ask, alone: Result, digits_model: nn.Module) -> None:
    before = {name: value.clone() for name, value in digits_model.state_dict().items()}
    shared = ask(device=["cpu", "cpu"])
    same(alone, shared)
    assert 0 < shared.robust < shared.clean
    assert shared.provenance["devices"] == ["cpu", "cpu"]
    assert "devices" not in alone.provenance
    assert all(torch.equal(value, before[name]) for name, value in digits_model.state_dict().items())
    assert all(p.requires_grad for p in digits_model.parameters())


@pytest.mark.gpu
def test_two_processes_on_one_gpu(digits: Any, digits_model: nn.Module) -> None:
    """Kernels may round otherwise there, so that a sample on the edge may fall to the other side."""
    x, y, attacks = digits.test_x[:64], digits.test_y[:64], ["pgd-10", "apgd-ce:steps=10"]
    alone, shared = (
        evaluate(digits_model, x, y, Linf(0.1), attacks=attacks, device=device, batch_size=16)
        for device in ("cuda", ["cuda:0", "cuda:0"])
    )
    assert torch.equal(alone.flags["clean"], shared.flags["clean"])
    assert alone.provenance["precision"] == shared.provenance["precision"]
    assert all(int((alone.flags[a] != shared.flags[a]).sum()) <= 1 for a in attacks)
    assert 0 < shared.robust < shared.clean


def test_interrupted_it_goes_on_with_any_number_of_devices(ask: Ask, alone: Result, tmp_path: Path) -> None:
    journal = tmp_path / "exam.part"
    with pytest.raises(KeyboardInterrupt):
        ask(device=["cpu", "cpu"], journal=journal, progress=Ends(9, KeyboardInterrupt))
    assert active_children() == []
    assert len(list(journal.glob("chunk-*"))) == 9
    with pytest.raises(KeyboardInterrupt):
        ask(journal=journal, resume=True, progress=Ends(14, KeyboardInterrupt))
    same(alone, ask(device=["cpu", "cpu"], journal=journal, resume=True))


def simple(model: nn.Module) -> Result:
    x = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    return evaluate(
        model, x, torch.tensor([0, 1, 0, 1]), Linf(0.1), attacks=["pgd-2"], device=["cpu", "cpu"], batch_size=2
    )


def test_failures_over_there_are_told() -> None:
    failures_over_there_are_told(simple)


def test_devices_that_do_not_exist(ask: Ask) -> None:
    with pytest.raises(ConfigError, match="unknown device 'gpu7'"):
        ask(device=["cpu", "gpu7"])


def test_workers_craft_alike() -> None:
    x, y = torch.rand(4, 2), torch.zeros(4, dtype=torch.long)
    model = Linear().eval()
    exam = Exam(model, Counted(model), x, y, Linf(0.1), CPU, 2, Seed(0))
    told = "on cpu attacks would craft in float32, on cpu in float16; name devices of one kind"
    with (
        pytest.raises(ConfigError, match=told),
        crew(exam, [CPU, CPU], ["pgd-2"], 3, precision="auto", crafted="float16"),
    ):
        raise AssertionError("the crew began")


def chunk(rows: Tensor) -> Chunk:
    right = torch.ones(len(rows), dtype=torch.bool)
    return Chunk("x", rows, right, torch.zeros(len(rows)), torch.empty(0, 2), {})


def attacked(task: Any) -> tuple[list[Chunk], int]:
    """A batch of three in two parts, as where memory is short, and what fits."""
    _, rows = task
    return [chunk(part) for part in ([rows[:1], rows[1:]] if len(rows) == 3 else [rows])], 2


@pytest.mark.parametrize("slow", [(0.05, 0.0, 0.0), (0.0, 0.05, 0.02), (0.0, 0.0, 0.05)])
def test_batches_come_in_order_whoever_is_slow(slow: tuple[float, ...]) -> None:
    rows, model = torch.arange(100, 120), Linear()
    exam = Exam(model, Counted(model), torch.rand(4, 2), torch.zeros(4).long(), Linf(0.1), CPU, 3, Seed(0))
    with served(slow, attacked) as (workers, seen):
        made = list(Crew(workers, exam).attempts(Step("x", GradientAttack()), rows))
    assert torch.equal(torch.cat([c.rows for c in made]), rows)
    assert [len(c.rows) for c in made] == [1, 2] * 6 + [2]
    assert sorted(row for tasks in seen for _, part in tasks for row in part.tolist()) == rows.tolist()  # each once
    assert all(seen)  # everybody worked
    assert exam.batch_size == 2


def test_samples_and_batches_travel_alone(ask: Ask, alone: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are views of many more, batches of the rows to attack; tasks have the numbers of 4 rows."""
    sizes = weighed(monkeypatch)
    kept, orders = crew_module.parcel, list[int]()

    def noted(tensor: Tensor) -> Tensor:
        sent = kept(tensor)
        orders.append(sent.untyped_storage().nbytes())
        return sent

    monkeypatch.setattr(crew_module, "parcel", noted)
    same(alone, ask(device=["cpu", "cpu"]))
    assert orders[:3] == [16 * 64 * 4, 16 * 8, 16 * 8], "inputs, labels, ids"
    assert all(size <= 4 * 8 for size in orders[3:])
    assert max(sizes[2:]) < 4 * 8 + 500


def test_the_batch_size_told_is_that_of_the_workers() -> None:
    x = torch.rand(16, 2)
    y = Linear()(x).argmax(1)
    asked: dict[str, Any] = {"attacks": ["fgsm", "pgd-2"], "keep_adversarial": True, "device": ["cpu", "cpu"]}
    cramped = evaluate(Cramped(), x, y, Linf(0.1), **asked, batch_size=8)
    assert cramped.provenance["batch_size"] == 2
    roomy = evaluate(Linear(), x, y, Linf(0.1), **asked, batch_size=8)
    assert roomy.provenance["batch_size"] == 8
    assert all(torch.equal(cramped.flags[k], roomy.flags[k]) for k in roomy.flags)
    assert torch.equal(cast(Tensor, cramped.adversarial), cast(Tensor, roomy.adversarial))
