"""Flatness methods inside the training step: doing nothing exactly, costing what they say, all of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from start_cases import same
from torch import Tensor, nn

from flatrock.core.types import Point
from flatrock.engine.craft import craft
from flatrock.engine.job import Job
from flatrock.engine.loss import Stage, objective_gradients
from flatrock.engine.step import train_step
from flatrock.flatness.catalog import FLATNESS

MakeJob = Callable[..., Job]
OBJECTIVES = {"at": {}, "trades": {"beta": 3}, "mart": {"beta": 2}, "alp": {"weight": 0.1}}
LINF, L2 = {"norm": "linf", "eps": 0.1}, {"norm": "l2", "eps": 0.4}
STRONG: dict[str, dict[str, Any]] = {
    "awp": {"gamma": 0.01},
    "rat": {"eta": 0.2, "sigma": 1e-3},
    "trh": {"weight": 1e-2, "gamma": 1e-4},
    "s2o": {"weight": 0.3},
    "swa": {"decay": 0.9},
    "sam": {"rho": 0.05},
}
STACKS = [*((name,) for name in STRONG), ("awp", "rat"), ("awp", "trh"), ("rat", "trh"), ("awp", "rat", "swa")]


def stack(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, **STRONG[name]} for name in names]


def steps(job: Job, count: int = 3) -> list[dict[str, float]]:
    """Train a few steps; the losses of each."""
    job.model.train()
    found = []
    for step, batch in zip(range(count), job.loader.epoch(0), strict=False):
        outcome = train_step(job, batch, step=step, guard=True)
        found.append({k: float(v) for k, v in outcome.losses.items()})
    return found


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


@contextmanager
def counted(model: nn.Module) -> Iterator[dict[str, int]]:
    """Forward passes of the network, and backward passes through it, inside."""
    counts = {"forward": 0, "backward": 0}

    def seen(_: nn.Module, inputs: Any, output: Tensor) -> None:
        counts["forward"] += 1
        if output.requires_grad:
            output.register_hook(lambda grad: counts.__setitem__("backward", counts["backward"] + 1))

    handle = model.head.register_forward_hook(seen)  # type: ignore[operator,union-attr]
    try:
        yield counts
    finally:
        handle.remove()


# Doing nothing

ZERO: list[list[dict[str, Any]]] = [
    [{"name": "awp", "gamma": 0}],
    [{"name": "awp", "gamma": 0.5, "warmup": 2}],  # these steps belong to epoch 1
    [{"name": "rat", "eta": 0, "sigma": 0}],
    [{"name": "rat", "order": 0, "sigma": 0}],
    [{"name": "rat", "terms": "exact", "sigma": 0}],
    [{"name": "trh", "weight": 0, "gamma": 0}],
    [{"name": "s2o", "weight": 0}],
    [{"name": "sam", "rho": 0}],
    [{"name": "swa", "decay": 0.9}],
    [{"name": "awp", "gamma": 0}, {"name": "rat", "eta": 0, "sigma": 0}, {"name": "trh", "weight": 0}, {"name": "swa"}],
]


@pytest.mark.parametrize("objective", ["at", "trades"])
@pytest.mark.parametrize("flatness", ZERO, ids=lambda f: "+".join(m["name"] for m in f))
def test_zero_strength_is_bit_identical_to_the_objective(
    make_job: MakeJob, tmp_path: Path, objective: str, flatness: list[dict[str, Any]]
) -> None:
    keys = {"objective": {"name": objective, **OBJECTIVES[objective]}}
    base, job = make_job(tmp_path / "a", **keys), make_job(tmp_path / "b", **keys, flatness=flatness)
    with counted(base.model) as plain, counted(job.model) as counts:
        expected, got = steps(base), steps(job)
    assert [g["total"] for g in got] == [e["total"] for e in expected]
    assert same(weights(job.model), weights(base.model))
    assert counts == plain


def test_strong_methods_do_change_the_weights(make_job: MakeJob, tmp_path: Path) -> None:
    """The check above can fail: every method but the average leads elsewhere."""
    base = make_job(tmp_path / "base")
    steps(base)
    for name in STRONG:
        job = make_job(tmp_path / name, flatness=stack(name))
        steps(job)
        assert same(weights(job.model), weights(base.model)) == (name == "swa"), name


# What it costs


@pytest.mark.parametrize(
    ("objective", "flatness", "forward", "backward"),
    [
        ("trades", (), 0, 0),
        ("trades", ("rat",), 0, 0),
        ("trades", ("trh",), 0, 0),
        ("trades", ("s2o",), 0, 0),
        ("trades", ("swa",), 0, 0),
        ("trades", ("awp",), 2, 2),
        ("trades", ("sam",), 2, 2),
        ("trades", ("awp", "rat", "trh", "swa"), 2, 2),
        ("mart", ("rat",), 0, 0),
        ("mart", ("trh",), 0, 0),
        ("at", ("trh",), 0, 0),
        ("at", ("swa",), 0, 0),
        ("at", ("awp",), 1, 1),
        ("at", ("rat",), 1, 1),  # AT makes no clean pass, and RAT compares with one
        ("at", ("s2o",), 1, 1),
    ],
)
def test_passes_of_one_step(
    make_job: MakeJob, tmp_path: Path, objective: str, flatness: tuple[str, ...], forward: int, backward: int
) -> None:
    """PGD-10: 10 attack passes (and TRADES' clean distribution), the objective's, and what the method adds."""
    keys = {"objective": {"name": objective, **OBJECTIVES[objective]}, "attack": {"steps": 10}}
    job = make_job(tmp_path / "run", **keys, flatness=stack(*flatness))
    with counted(job.model) as counts:
        steps(job, 1)
    passes = len(job.objective.passes)
    base = {"forward": 10 + (objective == "trades") + passes, "backward": 10 + passes}
    assert counts == {"forward": base["forward"] + forward, "backward": base["backward"] + backward}


# BatchNorm


def ticks(model: nn.Module) -> int:
    return next(int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"objective": {"name": "at"}}, 1),
        ({"objective": {"name": "at"}, "attack": {"bn_mode": "train", "steps": 4}}, 5),
        ({"objective": {"name": "trades"}}, 2),
        ({"objective": {"name": "trades", "forwards": "code"}}, 3),
        ({"objective": {"name": "trades"}, "flatness": ["rat"]}, 2),
        ({"objective": {"name": "trades"}, "flatness": ["awp", "rat", "trh"]}, 2),
        ({"objective": {"name": "trades", "forwards": "rat_code"}, "flatness": ["rat"]}, 8),
        ({"objective": {"name": "at"}, "flatness": ["s2o"]}, 2),
        ({"objective": {"name": "at", "forwards": "s2o_code"}, "flatness": ["s2o"]}, 4),
        ({"objective": {"name": "at", "forwards": "s2o_code"}}, 4),
        ({"objective": {"name": "at"}, "attack": {"name": "langevin", "steps": 4, "bn_mode": "train"}}, 2 * 4),
        (
            {
                "objective": {"name": "at"},
                "attack": {"name": "langevin", "steps": 4, "bn_mode": "train"},
                "train.clean_tick": True,
            },
            2 * 4 + 1,
        ),
        ({"objective": {"name": "at"}, "attack": {"bn_mode": "train", "steps": 4}, "train.clean_tick": True}, 6),
        ({"objective": {"name": "trades"}, "flatness": [{"name": "rat", "terms": "exact", "sigma": 0.01}]}, 2),
    ],
)
def test_batchnorm_ticks_per_step(make_job: MakeJob, tmp_path: Path, keys: dict[str, Any], expected: int) -> None:
    job = make_job(tmp_path / "run", **keys)
    steps(job, 1)
    assert ticks(job.model) == expected


def test_the_ascent_pass_gives_statistics_and_gradients_back(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run")
    job.model.train()
    batch = next(iter(job.loader.epoch(0)))
    before = weights(job.model)
    stage = Stage(job, batch.x, batch.y, batch.ids, job.moment(0))
    shift = {"head.weight": torch.ones_like(job.model.head.weight)}  # type: ignore[union-attr,arg-type]
    gradients = objective_gradients(stage, shift, (Point(batch.x),))
    assert gradients.keys() == dict(job.model.named_parameters()).keys()
    assert same(weights(job.model), before)
    assert all(p.grad is None for p in job.model.parameters())


# AWP in the step


@pytest.mark.parametrize("step", ["inside", "after"])
@pytest.mark.parametrize("name", ["awp", "sam"])
def test_weights_are_bit_identical_after_a_step_of_rate_zero(
    make_job: MakeJob, tmp_path: Path, name: str, step: str
) -> None:
    method = {**stack(name)[0], "step": step}
    job = make_job(tmp_path / "run", flatness=[method], optimizer={"lr": 0.0})
    before = {n: p.detach().clone() for n, p in job.model.named_parameters()}
    steps(job)
    assert same(dict(job.model.named_parameters()), before)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", ["inside", "after"])
def test_inside_decays_at_the_moved_weights(make_job: MakeJob, tmp_path: Path, step: str) -> None:
    """w <- w - lr (g(w + v) + wd (w + v)) inside, w - lr (g(w + v) + wd w) after, with v and g written out here."""
    lr, decay, gamma = 0.1, 0.3, 0.2
    optimizer = {"lr": lr, "momentum": 0.0, "weight_decay": decay}
    method = {"name": "awp", "gamma": gamma, "step": step}
    job = make_job(tmp_path / "run", flatness=[method], optimizer=optimizer, schedule={"name": "constant"})
    job.model.double().train()
    batch = next(iter(job.loader.epoch(0)))
    batch = type(batch)(batch.x.double(), batch.y, batch.ids)
    before = {n: p.detach().clone() for n, p in job.model.named_parameters()}
    buffers = {n: b.clone() for n, b in job.model.named_buffers()}
    from flatrock.engine.craft import craft

    stage = Stage(job, batch.x, batch.y, batch.ids, job.moment(0))
    points = craft(stage, {})
    g = objective_gradients(stage, {}, points)
    v = {n: gamma * before[n].norm() * g[n] / g[n].norm() for n in g if before[n].dim() > 1}
    g = objective_gradients(stage, v, points)
    for name, buffer in job.model.named_buffers():
        buffer.copy_(buffers[name])
    train_step(job, batch, step=0, guard=True)
    for name, p in job.model.named_parameters():
        at = before[name] + (v.get(name, 0.0) if step == "inside" else 0.0)
        expected = before[name] - lr * (g[name] + decay * at)
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-12)


# Everything with everything


@pytest.mark.parametrize("threat", [LINF, L2], ids=["linf", "l2"])
@pytest.mark.parametrize("names", STACKS, ids="+".join)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_combination_trains_finite_and_deterministic(
    make_job: MakeJob, tmp_path: Path, objective: str, names: tuple[str, ...], threat: dict[str, Any]
) -> None:
    keys = {"objective": {"name": objective, **OBJECTIVES[objective]}, "threat": threat, "flatness": stack(*names)}
    first, second = make_job(tmp_path / "a", **keys), make_job(tmp_path / "b", **keys)
    losses = steps(first)
    assert losses == steps(second)
    assert len(losses) == 3
    assert all(torch.isfinite(torch.tensor(list(one.values()))).all() for one in losses)
    assert same(weights(first.model), weights(second.model))
    assert all(bool(torch.isfinite(w).all()) for w in weights(first.model).values())


@pytest.mark.parametrize("threat", [LINF, L2], ids=["linf", "l2"])
@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer": {"name": "entropy_sgd", "steps": 3}},
        {"optimizer": {"name": "sgld", "noise": 1e-3}},
        {"optimizer": {"name": "adamw"}, "flatness": ["awp", "rat", "trh", "swa"]},
        {"attack": {"name": "langevin", "steps": 3}},
        {"attack": {"name": "langevin", "steps": 3}, "flatness": ["awp", "rat", "trh", "swa"]},
        {"optimizer": {"name": "entropy_sgd", "steps": 2}, "flatness": ["awp", "s2o"]},
        {"flatness": [{"name": "rat", "terms": "exact", "sigma": 0.01}]},
    ],
    ids=["entropy_sgd", "sgld", "adamw+all", "atent", "atent+all", "entropy_sgd+awp", "rat exact"],
)
@pytest.mark.parametrize("objective", ["at", "trades"])
def test_optimizers_inner_attacks_and_dear_modes_too(
    make_job: MakeJob, tmp_path: Path, objective: str, keys: dict[str, Any], threat: dict[str, Any]
) -> None:
    keys = {"objective": {"name": objective, **OBJECTIVES[objective]}, "threat": threat, **keys}
    first, second = make_job(tmp_path / "a", **keys), make_job(tmp_path / "b", **keys)
    losses = steps(first, 2)
    assert losses == steps(second, 2)
    assert all(torch.isfinite(torch.tensor(list(one.values()))).all() for one in losses)
    assert same(weights(first.model), weights(second.model))


def test_every_method_is_in_these_tests() -> None:
    assert set(STRONG) == set(FLATNESS.names())


def test_unlabeled_and_mixed_labels_pass_through_every_method(make_job: MakeJob, tmp_path: Path) -> None:
    mixed = make_job(tmp_path / "mixed", **{"data.augment.mixup": 1.0}, flatness=stack("awp", "rat", "trh", "s2o"))
    assert all(torch.isfinite(torch.tensor(list(one.values()))).all() for one in steps(mixed))
    job = make_job(tmp_path / "some", objective={"name": "trades"}, flatness=stack("awp", "rat", "trh", "s2o"))
    job.model.train()
    batch = next(iter(job.loader.epoch(0)))
    y = batch.y.clone()
    y[::2] = -1
    outcome = train_step(job, type(batch)(batch.x, y, batch.ids), step=0, guard=True)
    assert all(bool(torch.isfinite(v)) for v in outcome.losses.values())
    assert int(outcome.labelled) == len(y) // 2


def test_every_attack_of_a_step_sees_the_noise(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWP's second round attacks at w + noise + shift, with the noise of the first."""
    shifts: list[dict[str, Tensor]] = []

    def spy(stage: Stage, shift: Any) -> tuple[Point, ...]:
        shifts.append(dict(shift))
        return craft(stage, shift)

    monkeypatch.setattr("flatrock.engine.step.craft", spy)
    awp = {"name": "awp", "gamma": 0.01, "alternations": 2}
    job = make_job(tmp_path, flatness=[awp, {"name": "rat", "eta": 0.2, "sigma": 0.1, "noise_on": "conv"}])
    train_step(job, next(iter(job.loader.epoch(0))), step=0, guard=True)
    first, second = shifts
    assert set(first) < set(second)
    for name, noise in first.items():
        size = float(job.model.get_parameter(name).detach().norm())
        assert 0 < float((second[name] - noise).norm()) < 0.02 * size < float(noise.norm())


def test_ascent_and_loss_see_the_inputs_attacked_last(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWP in two rounds: each climbs on its own inputs, and the loss is that of the second."""
    made: list[Tensor] = []

    def spy(stage: Stage, shift: Any) -> tuple[Point, ...]:
        points = craft(stage, shift)
        made.append(points[-1].x_adv)
        return points

    monkeypatch.setattr("flatrock.engine.step.craft", spy)
    job = make_job(tmp_path, objective={"name": "at"}, flatness=[{"name": "awp", "gamma": 0.1, "alternations": 2}])
    job.model.train()
    seen: list[Tensor] = []
    first = next(m for m in job.model.modules() if isinstance(m, nn.Conv2d))
    first.register_forward_pre_hook(lambda m, x: seen.append(x[0].detach().clone()) if m.training else None)
    train_step(job, next(iter(job.loader.epoch(0))), step=0, guard=True)
    one, two = made
    assert not torch.equal(one, two)
    assert [torch.equal(a, b) for a, b in zip(seen, (one, two, two), strict=True)] == [True] * 3
