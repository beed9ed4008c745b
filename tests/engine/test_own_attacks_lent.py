"""An attack of one's own may do to the network what it likes: training finds it as it was, as does the attack's next
batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from flatrock.attacks.written import Written
from flatrock.core.errors import ModelError
from flatrock.core.rng import SampleGen, Seed
from flatrock.core.threat import Linf, Threat
from flatrock.core.types import Attack, Point
from flatrock.diagnostics.probe import Probe, Reading
from flatrock.engine.job import Job
from flatrock.engine.runner import Engine, Runner
from flatrock.engine.step import train_step

MakeJob = Callable[..., Job]
seen: list[bool] = []


def still(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen) -> Tensor:
    return x.clone()


def rude(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen) -> Tensor:
    """Leaves another mode behind, and statistics of its own batch."""
    seen.append(model.training)
    model.train(not model.training)
    model(x)
    return x.clone()


@dataclass(frozen=True)
class Way:
    """The same on a path."""

    writes: bool = False
    mixed_labels: ClassVar[bool] = False
    bounded: ClassVar[bool] = True
    points: ClassVar[int] = 1

    def __call__(self, model: Any, x: Tensor, y: Any, threat: Any, gen: Any, *, early_stop: bool = False) -> Tensor:
        return rude(model, x, y, threat, gen)

    def path(self, model: Any, x: Tensor, y: Any, threat: Any, gen: Any) -> tuple[Point, ...]:
        if self.writes:
            with torch.no_grad():
                next(model.parameters()).mul_(2)
        return (Point(rude(model, x, y, threat, gen)),)

    def passes(self, classes: int) -> int:
        return 1


def after(job: Job, attack: Attack, steps: int = 3) -> dict[str, Tensor]:
    """Everything the network is after some steps."""
    seen.clear()
    job = replace(job, attack=attack)
    job.model.train()
    for step, batch in zip(range(steps), job.loader.epoch(0), strict=False):
        train_step(job, batch, step=step, guard=True)
    assert job.model.training
    return {name: tensor.clone() for name, tensor in job.model.state_dict().items()}


@pytest.mark.parametrize("bn_mode", ["eval", "frozen"])
@pytest.mark.parametrize("parts", [None, 6], ids=["whole", "parts"])
@pytest.mark.parametrize("attack", [Written(rude, {}), Way()], ids=["function", "path"])
def test_an_attack_that_trains_the_network_changes_nothing(
    make_job: MakeJob, tmp_path: Path, bn_mode: str, parts: int | None, attack: Attack
) -> None:
    how = {"attack__bn_mode": bn_mode, "train__micro_batch": parts}
    mine, theirs = (after(make_job(tmp_path, **how), one) for one in (attack, Written(still, {})))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs), "BatchNorm statistics are the pass's alone"
    after(make_job(tmp_path, **how), attack)
    assert set(seen) == {bn_mode != "eval"}, "every part of a batch is attacked in the mode the recipe names"


def spoils(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen) -> Tensor:
    """Writes into inputs and labels, as torch counts it and as it does not."""
    result = x.clone()
    x.numpy()[...] = 0.5
    y.add_(1).remainder_(10)
    return result


@dataclass(frozen=True)
class Spoiling(Way):
    """The same on a path, and where it is asked for noise."""

    def path(self, model: Any, x: Tensor, y: Any, threat: Any, gen: Any) -> tuple[Point, ...]:
        return (Point(spoils(model, x, y, threat, gen)),)

    def input_noise(self, x: Tensor, gen: SampleGen) -> Tensor | None:
        x.numpy()[...] = 0.5
        return None


@pytest.mark.parametrize("attack", [Written(spoils, {}), Spoiling()], ids=["function", "path"])
def test_what_an_attack_writes_into_is_its_own(make_job: MakeJob, tmp_path: Path, attack: Attack) -> None:
    mine, theirs = (after(make_job(tmp_path), one) for one in (attack, Written(still, {})))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs), "the loss is that of the samples and labels"


def test_a_probe_measures_what_it_was_given(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    x, y, ids = torch.rand(8, 1, 8, 8), torch.arange(8), torch.arange(8)

    def readings(how: Callable[..., Tensor]) -> list[Reading]:
        how_asked: dict[str, Any] = {"threat": Linf(0.1), "seed": Seed(0), "batch_size": 4}
        probe = Probe(job.model.eval(), x.clone(), y.clone(), ids=ids, attack=Written(how, {}), **how_asked)
        return [probe(), probe()]

    assert readings(spoils) == readings(still)


def test_batch_statistics_tick_where_they_are_meant_to(make_job: MakeJob, tmp_path: Path) -> None:
    def asks(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen) -> Tensor:
        model(x)
        return x.clone()

    mine, theirs = (
        after(make_job(tmp_path, attack__bn_mode="train"), Written(how, {}), steps=1) for how in (asks, still)
    )
    ticks = next(name for name in mine if name.endswith("num_batches_tracked"))
    assert (int(mine[ticks]), int(theirs[ticks])) == (2, 1)


def test_the_copy_that_is_attacked_stays_in_eval_mode(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    job = replace(job, runner=Runner(job.model, Engine(precision="bfloat16", twin=True), size=16))
    after(job, Written(rude, {}))
    assert set(seen) == {False}


def test_a_path_that_writes_into_the_weights_is_noticed(make_job: MakeJob, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"attack Way\(writes=True\) changed the weights of the model"):
        after(make_job(tmp_path), Way(writes=True))
