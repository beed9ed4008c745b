"""HAT in training: who is asked what and how often, what gamma 0 leaves of it, methods beside it, the fast copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.tensorfile import load
from flatrock.core.types import Parts, Views
from flatrock.engine import helper as helper_module
from flatrock.engine.average import averaged
from flatrock.engine.craft import craft
from flatrock.engine.helper import Helper
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.loss import Stage
from flatrock.engine.runner import Engine, Runner
from flatrock.engine.step import train_step
from flatrock.models.catalog import create_model
from flatrock.models.twin import Twin
from flatrock.objectives.hat import HAT

MakeJob = Callable[..., Job]
AWP, SWA = {"name": "awp", "gamma": 0.01}, {"name": "swa", "decay": 0.8, "bn": "recompute", "batches": 2}
METHODS: list[list[dict[str, Any]]] = [
    [AWP],
    [{"name": "rat", "eta": 0.2, "sigma": 1e-3}],
    [{"name": "rat", "terms": "exact", "sigma": 1e-2}],
    [{"name": "trh", "weight": 1e-2, "gamma": 1e-4}],
    [{"name": "trh", "weight": 1e-2, "clean": "full"}],
    [{"name": "s2o", "weight": 0.3}],
    [{"name": "sam", "rho": 0.05}],
    [AWP, {"name": "rat", "eta": 0.2, "sigma": 0}, SWA],
]


def steps(job: Job, count: int = 3) -> list[dict[str, float]]:
    job.model.train()
    ready = zip(range(count), job.loader.epoch(0), strict=False)
    outcomes = [train_step(job, batch, step=step, guard=True) for step, batch in ready]
    return [{k: float(v) for k, v in outcome.losses.items()} for outcome in outcomes]


def crafted(job: Job) -> tuple[Tensor, Any]:
    batch = next(iter(job.loader.epoch(0)))
    (point,) = craft(Stage(job, batch.x, batch.y, batch.ids, job.moment(0)), {})
    return batch.x, point


class Recorded(HAT):
    """Keeps what its loss is given."""

    def loss(self, views: Views, y: Tensor) -> Parts:
        seen.append(views)
        return super().loss(views, y)


seen: list[Views] = []


# What the helper is asked


def test_it_labels_the_adversarial_inputs_and_reaches_beyond_them(hat: Callable[..., Job]) -> None:
    job = hat()
    assert job.helper is not None
    x, point = crafted(job)
    beyond = point.help.x
    torch.testing.assert_close(beyond, 2 * point.x_adv - x, rtol=0, atol=1e-6)
    assert torch.equal(beyond, x + 2 * (point.x_adv - x))
    assert float((beyond - x).abs().max()) > job.threat.eps + 1e-3, "out of the ball"
    assert float(beyond.min()) < 0, "and of the box"
    network = job.helper.network
    assert not network.training
    assert torch.equal(point.help.y, network(point.x_adv).argmax(1))
    assert not torch.equal(point.help.y, network(beyond).argmax(1))
    assert not any(t.requires_grad for t in (point.x_adv, beyond, point.help.y, *network.parameters()))


def test_reach_is_an_option(hat: Callable[..., Job]) -> None:
    x, point = crafted(hat(options={"reach": 0.5}))
    assert torch.equal(point.help.x, x + 0.5 * (point.x_adv - x))


@pytest.mark.parametrize(
    ("flatness", "asked", "losses"),
    [([], 1, 1), ([AWP], 1, 2), ([{**AWP, "alternations": 2}], 2, 3), ([{"name": "sam", "rho": 0.05}], 1, 2)],
    ids=["alone", "awp", "awp twice", "sam"],
)
def test_it_is_asked_once_per_crafted_batch(
    hat: Callable[..., Job], flatness: list[dict[str, Any]], asked: int, losses: int
) -> None:
    """Every loss of the step, the ascent of the weights too, is told the same."""
    job = hat(flatness=flatness)
    assert job.helper is not None and isinstance(job.objective, HAT)
    job = replace(job, objective=Recorded(helper=job.objective.helper))
    seen.clear()
    calls: list[Tensor] = []
    before = {k: v.clone() for k, v in job.helper.network.state_dict().items()}
    handle = job.helper.network.head.register_forward_hook(lambda *_: calls.append(torch.tensor(0)))
    ticks: list[bool] = []
    job.model.head.register_forward_hook(lambda module, *_: ticks.append(module.training))  # type: ignore[operator,union-attr]
    steps(job, 1)
    handle.remove()
    assert (len(calls), len(seen)) == (asked, losses)
    assert sum(ticks) == 3 * losses
    assert len({id(v.helper_y) for v in seen}) == asked
    assert seen[-1].helper_y is not None and not seen[-1].helper_y.is_floating_point()
    after = job.helper.network.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert all(p.grad is None for p in job.helper.network.parameters())


def test_batch_norm_ticks_for_clean_adversarial_and_helpers_inputs_in_this_order(hat: Callable[..., Job]) -> None:
    job = hat()
    job.model.train()
    x, point = crafted(job)
    norm = job.model.get_submodule("bn1")
    inputs: list[Tensor] = []
    mean = norm.running_mean.clone()  # type: ignore[operator,union-attr]
    expected = [view_of.clone() for view_of in (x, point.x_adv, point.help.x)]
    passes: list[Tensor] = []
    job.model.get_submodule("conv1").register_forward_hook(
        lambda module, given, _: passes.append(given[0].detach().clone()) if module.training else None
    )
    norm.register_forward_hook(lambda module, given, _: inputs.append(given[0].detach()) if module.training else None)
    steps(job, 1)
    assert [torch.equal(a, b) for a, b in zip(passes, expected, strict=True)] == [True] * 3
    for z in inputs:
        mean = 0.9 * mean + 0.1 * z.mean((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, mean)
    assert int(norm.num_batches_tracked) == 3  # type: ignore[arg-type]


def test_on_at_the_attack_and_the_loss_are_those_of_at(hat: Callable[..., Job]) -> None:
    """With beta 1 and gamma 0.5: the cross-entropies of three train-mode passes, crafted as AT crafts."""
    job = hat(options={"form": "at", "beta": 1.0})
    assert getattr(job.attack, "loss", "") == "ce"
    job.model.train()
    x, point = crafted(job)
    y = next(iter(job.loader.epoch(0))).y
    views = [(x, y), (point.x_adv, y), (point.help.x, point.help.y)]
    model = copy.deepcopy(job.model)  # whose statistics may move
    with torch.no_grad():
        ce = [float(nn.functional.cross_entropy(model(v), k)) for v, k in views]
    (losses,) = steps(job, 1)
    assert losses == pytest.approx(
        {"ce": ce[0], "ce_adv": ce[1], "ce_helper": ce[2], "total": ce[0] + ce[1] + 0.5 * ce[2]}, rel=1e-6
    )


def test_three_passes_are_one_when_compiled(hat: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda work, **options: work)
    plain, job = hat("a", flatness=[AWP]), hat("b", flatness=[AWP])
    job = replace(job, runner=Runner(job.model, Engine(compile=True), size=16))
    got, expected = steps(job, 1), steps(plain, 1)  # later, rounding moves a pixel whose gradient is all but zero
    assert got[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    for (name, a), b in zip(job.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=name)
    assert job.runner._joints[3] is not None
    assert job.findings == {}


def test_fast_steps_are_near_the_reference(hat: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: bfloat16 passes, float16 copies of both networks (compiling apart)."""
    monkeypatch.setattr(torch, "compile", lambda work, **options: work)
    keys: dict[str, Any] = {"flatness": [AWP], "optimizer__lr": 0.1}
    expected, job = steps(hat("a", **keys)), hat("b", **keys)
    assert job.helper is not None
    engine = Engine(precision="bfloat16", compile=True, twin=True)
    helper = Helper(job.helper.network, reach=job.helper.reach, fast=True)
    got = steps(replace(job, runner=Runner(job.model, engine, size=16), helper=helper))
    assert [one["total"] for one in got] == pytest.approx([one["total"] for one in expected], rel=0.02)
    assert helper.findings == {}


# What is left without it


@pytest.mark.parametrize("flatness", [[], [AWP, SWA]], ids=["alone", "awp and swa"])
def test_gamma_zero_is_trades_to_the_bit(
    make_job: MakeJob, hat: Callable[..., Job], tmp_path: Path, flatness: list[dict[str, Any]]
) -> None:
    """The helper is not even looked for."""
    trades = make_job(tmp_path / "trades", objective={"name": "trades", "beta": 3}, flatness=flatness)
    job = hat("hat", helper=tmp_path / "nowhere", options={"beta": 3, "gamma": 0}, flatness=flatness)
    assert job.helper is None
    assert "helper" not in job.provenance
    runs = train(trades), train(job)
    assert [r.terms for r in runs[0].records] == [r.terms for r in runs[1].records]
    files = ["last", "best", *(["average-last"] if flatness else [])]
    for file in files:
        a, b = (load(run.folder / f"{file}.safetensors")[0] for run in runs)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_gamma_leads_elsewhere(hat: Callable[..., Job]) -> None:
    first, second = steps(hat("a", options={"gamma": 0})), steps(hat("b"))
    assert first[0]["ce"] == second[0]["ce"], "the same weights to begin with"
    assert first[2]["ce"] != second[2]["ce"]
    one = second[0]
    assert one["total"] == pytest.approx(one["ce"] + 2.5 * one["kl"] + 0.5 * one["ce_helper"], rel=1e-5)


# Methods beside it


@pytest.mark.parametrize("flatness", METHODS, ids=lambda f: "+".join(m["name"] for m in f))
def test_every_method_trains_beside_it(hat: Callable[..., Job], flatness: list[dict[str, Any]]) -> None:
    job = hat(flatness=flatness)
    found = steps(job)
    assert all(torch.isfinite(torch.tensor(list(one.values()))).all() for one in found)
    assert all({"ce", "kl", "ce_helper"} <= one.keys() for one in found)


def test_statistics_of_an_average_come_from_all_three_passes(hat: Callable[..., Job]) -> None:
    job = hat(flatness=[AWP, SWA])
    steps(job)
    assert job.averaging is not None
    with averaged(job, job.averaging, step=2) as model:
        assert int(model.get_buffer("bn1.num_batches_tracked")) == 2 * 3


def test_a_walk_asks_at_every_point(hat: Callable[..., Job]) -> None:
    job = hat(attack={"name": "langevin", "steps": 3})
    batch = next(iter(job.loader.epoch(0)))
    points = craft(Stage(job, batch.x, batch.y, batch.ids, job.moment(0)), {})
    assert len(points) > 1
    for point in points:
        assert point.help is not None
        assert torch.equal(point.help.x, batch.x + 2 * (point.x_adv - batch.x))
    assert np.isfinite(steps(job, 1)[0]["total"])


def test_samples_without_labels(make_job: MakeJob, hat: Callable[..., Job], tmp_path: Path) -> None:
    file = tmp_path / "extra.npz"
    np.savez(file, image=np.full((8, 8, 8, 1), 90, np.uint8), label=np.full(8, -1))
    extra = {"data__extra": {"file": str(file), "fraction": 0.5}}
    assert np.isfinite(steps(hat(**extra), 1)[0]["ce_helper"])
    with pytest.raises(ConfigError, match="unlabelled images; they need objective trades or hat, with kl-pgd"):
        make_job(tmp_path / "at", **extra)


# The copy of a fast engine


def network() -> Any:
    return create_model("digits_cnn", num_classes=10)


def images(n: int = 32) -> Tensor:
    return torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_a_fast_helper_answers_alike() -> None:
    x, x_adv = images(), images().flip(0)
    plain, fast = Helper(network(), reach=2.0), Helper(network(), reach=2.0, fast=True)
    assert isinstance(fast._asked, Twin)
    assert fast.digest == plain.digest
    fast.check(x)
    true, got = plain(x, x_adv), fast(x, x_adv)
    assert torch.equal(true.x, got.x)
    assert float((true.y == got.y).double().mean()) > 0.9
    assert fast.findings == {}
    assert fast.plain()._asked is fast.network


def test_a_copy_that_overflows_is_not_asked() -> None:
    model = network()
    with torch.no_grad():
        model.head.weight.mul_(1e7)
    helper = Helper(model, reach=2.0, fast=True)
    helper.check(images())
    assert helper.findings == {"T05": "the helper's float16 copy overflows; the network itself is asked"}
    assert torch.equal(helper(images(), images()).y, model(images()).argmax(1))


def test_a_network_that_cannot_be_copied_is_asked_itself(
    hat: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> nn.Module:
        raise RuntimeError("no compiler here\nat all")

    monkeypatch.setattr(helper_module, "faithful", broken)
    helper = Helper(network(), reach=2.0, fast=True)
    job = replace(hat(), helper=helper)
    why = "the helper's float16 copy cannot be made (RuntimeError: no compiler here); the network itself is asked"
    assert job.findings == {"T05": why}
    assert np.isfinite(steps(job, 1)[0]["total"])
