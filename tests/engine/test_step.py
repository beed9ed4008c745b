"""What one update does to BatchNorm, gradients and weights besides moving them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from start_cases import same
from torch import Tensor, nn

from flatrock.core.errors import ThreatError
from flatrock.core.hooks import Penalty
from flatrock.core.types import Parts, Point
from flatrock.data.augment import cutmix
from flatrock.data.loader import Batch
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.engine.loss import joined, run_passes
from flatrock.engine.runner import Runner
from flatrock.engine.step import StepOutcome, train_step
from flatrock.engine.watch import Watch

MakeJob = Callable[..., Job]


def first(job: Job) -> Batch:
    job.model.train()
    return next(iter(job.loader.epoch(0)))


def buffers(job: Job) -> dict[str, Tensor]:
    return {k: b.clone() for k, b in job.model.named_buffers()}


def ticks(job: Job) -> int:
    counts = {int(b) for k, b in job.model.named_buffers() if k.endswith("num_batches_tracked")}
    (count,) = counts
    return count


def weights(job: Job) -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in job.model.named_parameters()}


class Recorder:
    """An attack that keeps what another made; with `made`, one that gives that back without touching the model."""

    bounded = True

    def __init__(self, inner: Any = None, made: list[Tensor] | None = None) -> None:
        self.inner = inner
        self.made: list[Tensor] = [] if made is None else list(made)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, *rest: Any, **options: Any) -> Tensor:
        if self.inner is None:
            return self.made.pop(0)
        self.training = model.training
        self.made.append(self.inner(model, x, y, *rest, **options))
        self.grads = [p.grad for p in model.parameters()]
        self.wanted = [p.requires_grad for p in model.parameters()]
        return self.made[-1]


def three_steps(job: Job) -> None:
    job.model.train()
    for step, batch in enumerate(job.loader.epoch(0)):
        train_step(job, batch, step=step, guard=True)


def recorded(job: Job) -> tuple[Job, Recorder]:
    spy = Recorder(job.attack)
    return replace(job, attack=spy), spy


@pytest.mark.parametrize("objective", ["at", "trades"])
@pytest.mark.parametrize("bn_mode", ["eval", "frozen"])
def test_attack_leaves_statistics_alone(make_job: MakeJob, tmp_path: Path, objective: str, bn_mode: str) -> None:
    """Three steps leave the buffers and weights of three steps whose x' fell from the sky."""
    job, spy = recorded(make_job(tmp_path, objective={"name": objective}, attack__bn_mode=bn_mode))
    replayed = make_job(tmp_path, objective={"name": objective})
    three_steps(job)
    replayed = replace(replayed, attack=Recorder(made=spy.made))
    three_steps(replayed)
    assert ticks(job) == 3 * len(job.objective.passes)
    assert same(buffers(job), buffers(replayed))
    assert same(weights(job), weights(replayed))


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    ("objective", "bn_mode", "more"),
    [
        ({"name": "at"}, "eval", 1),
        ({"name": "at"}, "frozen", 1),
        ({"name": "trades"}, "eval", 2),
        ({"name": "trades", "forwards": "code"}, "eval", 3),
        ({"name": "trades", "forwards": "awp_code"}, "frozen", 3),
        ({"name": "standard"}, "eval", 1),
    ],
)
def test_ticks_without_the_attacks(
    make_job: MakeJob, tmp_path: Path, objective: dict[str, Any], bn_mode: str, more: int, steps: int
) -> None:
    job = make_job(tmp_path, objective=objective, attack__bn_mode=bn_mode, attack__steps=steps)
    train_step(job, first(job), step=0, guard=True)
    assert ticks(job) == more


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize(("objective", "more"), [("at", 1), ("trades", 3), ("mart", 2)])
def test_train_mode_ticks_in_every_pass(
    make_job: MakeJob, tmp_path: Path, objective: str, more: int, steps: int
) -> None:
    """K attack passes and the objective's own; the KL attack also needs the clean logits once."""
    job = make_job(tmp_path, objective={"name": objective}, attack__bn_mode="train", attack__steps=steps)
    train_step(job, first(job), step=0, guard=True)
    assert ticks(job) == steps + more


def test_modes_differ_as_named(make_job: MakeJob, tmp_path: Path) -> None:
    """train and frozen craft the same x' in the first step (batch statistics), eval another; all restore the mode."""
    made = {}
    for bn_mode in ("eval", "train", "frozen"):
        job, spy = recorded(make_job(tmp_path, attack__bn_mode=bn_mode, attack__steps=3))
        train_step(job, first(job), step=0, guard=True)
        made[bn_mode] = spy.made[0]
        assert spy.training == (bn_mode != "eval")
        assert all(m.training for m in job.model.modules())
    assert torch.equal(made["train"], made["frozen"])
    assert not torch.equal(made["train"], made["eval"])


@pytest.mark.parametrize("bn_mode", ("eval", "train", "frozen"))
def test_attack_leaves_no_gradient_on_weights(make_job: MakeJob, tmp_path: Path, bn_mode: str) -> None:
    job, spy = recorded(make_job(tmp_path, attack__bn_mode=bn_mode, attack__steps=2))
    batch = first(job)
    train_step(job, batch, step=0, guard=True)
    assert spy.grads == [None] * len(spy.grads)
    assert not any(spy.wanted), "weights are frozen while the attack runs"
    assert all(p.requires_grad for p in job.model.parameters())
    assert any(p.grad is not None for p in job.model.parameters())
    train_step(job, batch, step=1, guard=True)
    assert spy.grads == [None] * len(spy.grads), "old gradients go before the attack, which adds none"


def test_gradient_is_that_of_the_loss_alone(make_job: MakeJob, tmp_path: Path) -> None:
    """What the optimizer sees after the second step is d loss/d w of that step, to the last bit."""
    job, spy = recorded(make_job(tmp_path, optimizer__lr=0))
    batches = list(job.loader.epoch(0))
    job.model.train()
    for step in (0, 1):
        train_step(job, batches[step], step=step, guard=True)
    got = [p.grad.clone() for p in job.model.parameters() if p.grad is not None]
    loss = nn.functional.cross_entropy(job.model(spy.made[1]), batches[1].y, reduction="none").sum() / 16
    expected = torch.autograd.grad(loss, list(job.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_zero_rate_moves_no_weight(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(tmp_path, optimizer__lr=0, optimizer__nesterov=True, optimizer__l1=1e-3)
    before, stats = weights(job), buffers(job)
    for step, batch in enumerate(job.loader.epoch(0)):
        job.model.train()
        train_step(job, batch, step=step, guard=True)
    assert same(before, weights(job))
    assert not same(stats, buffers(job)), "BatchNorm still counts"


@pytest.mark.parametrize(
    ("objective", "forwards", "flatness"),
    [("trades", "code", []), ("trades", "awp_code", []), ("at", "s2o_code", []), ("at", "s2o_code", ["s2o"])],
)
def test_repeated_pass_changes_statistics_only(
    make_job: MakeJob, tmp_path: Path, objective: str, forwards: str, flatness: list[str]
) -> None:
    """Without momentum of the statistics in play (first step), the weights agree to the last bit."""
    ways = [{"name": objective, "forwards": f} for f in ("paper", forwards)]
    jobs = [make_job(tmp_path, objective=way, flatness=flatness) for way in ways]
    for job in jobs:
        train_step(job, first(job), step=0, guard=True)
    assert same(weights(jobs[0]), weights(jobs[1]))
    assert not same(buffers(jobs[0]), buffers(jobs[1]))


def test_passes_run_in_the_named_order(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    batch = first(job)
    x, x_adv = batch.x, batch.x.flip(0).clone()
    seen: list[tuple[str, bool]] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(("clean" if inputs[0] is x else "adv", torch.is_grad_enabled()))

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model.register_forward_pre_hook(note)
    (views,) = run_passes(Runner(model), ("adv", "clean", "clean", "adv"), x, [Point(x_adv)])
    assert seen == [("adv", True), ("clean", True), ("clean", False), ("adv", False)]
    assert views.clean is not None
    assert views.adv is not None
    assert torch.equal(views.clean.logits, model(x))
    assert torch.equal(views.adv.logits, model(x_adv))
    assert run_passes(Runner(model), ("adv",), x, [Point(x_adv)])[0].clean is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [(0.3, "left the linf ball of radius 0.1 by"), (float("nan"), "NaN"), (-0.01, r"left the box \[0, 1\]")],
)
def test_guard_catches_a_faulty_attack(make_job: MakeJob, tmp_path: Path, fault: float, message: str) -> None:
    job = make_job(tmp_path)
    batch = first(job)
    broken = replace(job, attack=Recorder(made=[batch.x + fault]))
    before = weights(job)
    with pytest.raises(ThreatError, match=message):
        train_step(broken, batch, step=0, guard=True)
    assert same(before, weights(job))


@pytest.mark.parametrize("objective", ["at", "trades", "standard"])
def test_outcome_counts_the_attacked_pass(make_job: MakeJob, tmp_path: Path, objective: str) -> None:
    """Labels are what the model says of x; under an attack that deals out other people's images few stay right."""
    job = make_job(tmp_path, objective={"name": objective}, optimizer__lr=0)
    job = replace(job, attack=job.attack and Recorder(made=[first(job).x.flip(0)]))
    x, ids = first(job).x, first(job).ids
    with torch.no_grad():
        says = job.model(x).argmax(1)
    outcome = train_step(job, Batch(x, says, ids), step=0, guard=False)
    right = len(x) if objective == "standard" else int((says.flip(0) == says).sum())
    assert right < len(x) or objective == "standard"
    assert (int(outcome.right), outcome.samples) == (right, 16)


def test_cutmix_trains_on_the_cut_batch(make_job: MakeJob, tmp_path: Path) -> None:
    """The update is that of its inputs and soft labels, attack included."""
    job, other = (make_job(tmp_path, data__augment=keys) for keys in ({"cutmix": 1.0}, {}))
    batch = first(job)
    hot = nn.functional.one_hot(batch.y, 10).float()
    x, y = cutmix(batch.x, hot, job.seed.child("cutmix", 5), alpha=1.0)
    got = train_step(job, batch, step=5, guard=True)
    expected = train_step(other, replace(batch, x=x, y=y), step=5, guard=True)
    assert same(weights(job), weights(other))
    assert {k: float(v) for k, v in got.losses.items()} == {k: float(v) for k, v in expected.losses.items()}
    assert not torch.equal(x, batch.x)


def test_mixup_recipe_runs(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", data__augment={"mixup": 1.4}, train__epochs=1, train__max_steps=2)
    before = weights(job)
    run = train(job)
    assert run.status == "truncated"
    assert 0 < run.last.terms["ce_adv"] < 10
    assert not same(before, weights(job))


def test_soft_labels_take_weight_from_the_true_labels_alone() -> None:
    """Both factors multiply ce, ce_adv and boost; every other term, and what methods add, keeps its weight."""
    weights = {"ce": 1.0, "ce_adv": 2.0, "boost": 3.0, "kl": 6.0, "wkl": 5.0, "ce_helper": 0.5, "pair_logits": 0.7}
    terms = {name: torch.tensor(float(i), dtype=torch.float64) for i, name in enumerate(weights, 1)}
    added = [
        Penalty({"s2o": torch.tensor(10.0)}, {"s2o": 0.3}, label_factor=0.7),
        Penalty({"rat_first": torch.tensor(20.0)}, {"rat_first": 0.2}, label_factor=0.8),
        Penalty({"trace": torch.tensor(30.0)}, {"trace": 1e-4}),
    ]
    whole = joined(Parts(terms, weights), added)
    labels = {name: 0.7 * 0.8 * weights[name] for name in ("ce", "ce_adv", "boost")}
    assert whole.weights == pytest.approx({**weights, **labels, "s2o": 0.3, "rat_first": 0.2, "trace": 1e-4})
    assert float(whole.total) == pytest.approx(0.56 * (1 + 4 + 9) + 24 + 25 + 3 + 4.9 + 3 + 4 + 3e-3)


def test_when_a_step_happens(make_job: MakeJob, tmp_path: Path) -> None:
    """Epochs from 1, steps from 0, and a share of training that is 0 at the first step and 1 at the last."""
    job = make_job(tmp_path)
    steps = len(job.loader)
    assert steps > 1
    moments = [job.moment(step) for step in range(job.epochs * steps)]
    assert [m.epoch for m in moments] == [epoch for epoch in range(1, job.epochs + 1) for _ in range(steps)]
    assert [m.step for m in moments] == list(range(job.epochs * steps))
    assert [m.share for m in moments] == [i / (len(moments) - 1) for i in range(len(moments))]


def test_an_epoch_is_the_mean_over_its_samples() -> None:
    """Losses count every sample of a batch, accuracy those with a label."""
    watch = Watch()
    for step, (loss, right, labelled, samples) in enumerate([(2.0, 3, 4, 8), (5.0, 1, 4, 4)]):
        outcome = StepOutcome({"total": torch.tensor(loss)}, torch.tensor(right), torch.tensor(labelled), samples)
        watch.see(outcome, step)
    assert watch.means() == {"total": pytest.approx((8 * 2 + 4 * 5) / 12)}
    assert watch.accuracy() == 0.5
