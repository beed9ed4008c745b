"""Learning rates against the papers' numbers, torch, and their own end points."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from flatrock.core.errors import ConfigError
from flatrock.engine.schedule import (
    SCHEDULES,
    Constant,
    Cosine,
    Cyclic,
    OneCycle,
    Piecewise,
    Schedule,
    WarmupCosine,
    time_at,
)

EXACT = pytest.approx


def piecewise(clock: str) -> Piecewise:
    return Piecewise(lr=0.1, epochs=200, clock=clock)


@pytest.mark.parametrize(("epoch", "rate"), [(1, 0.1), (99, 0.1), (100, 0.01), (149, 0.01), (150, 0.001), (200, 0.001)])
@pytest.mark.parametrize("steps", [1, 7, 391])
def test_rat_counts_epochs_from_one(epoch: int, rate: float, steps: int) -> None:
    first, last = (epoch - 1) * steps, epoch * steps - 1
    for step in (first, last):
        assert piecewise("epoch_from_1").at(step, steps) == EXACT(rate, rel=1e-12)


@pytest.mark.parametrize(("epoch", "rate"), [(99, 0.1), (100, 0.01), (149, 0.01), (150, 0.001)])
def test_epoch_clock_counts_epochs_from_zero(epoch: int, rate: float) -> None:
    assert piecewise("epoch").at(epoch * 5, 5) == EXACT(rate, rel=1e-12)
    assert piecewise("epoch").at(epoch * 5 + 4, 5) == EXACT(rate, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 7, 391])
def test_awp_drops_with_the_step_that_completes_the_milestone(steps: int) -> None:
    """t = epoch + (i + 1)/n: the last step of the 100th epoch already has t = 100."""
    s = piecewise("step")
    for milestone, before, after in ((100, 0.1, 0.01), (150, 0.01, 0.001)):
        assert s.at(milestone * steps - 2, steps) == EXACT(before, rel=1e-12)
        assert s.at(milestone * steps - 1, steps) == EXACT(after, rel=1e-12)


def test_clocks() -> None:
    assert [time_at(step, 4, "step") for step in (0, 3, 4)] == [0.25, 1.0, 1.25]
    assert [time_at(step, 4, "epoch") for step in (0, 3, 4)] == [0, 0, 1]
    assert [time_at(step, 4, "epoch_from_1") for step in (0, 3, 4)] == [1, 1, 2]


def test_cosine_golden() -> None:
    s = Cosine(lr=0.1, epochs=200)
    assert s.rate(120) == EXACT(0.0345492, abs=5e-8)
    assert s.rate(120) == EXACT(0.05 * (1 + math.cos(math.pi * 0.6)), rel=1e-12)
    assert (s.rate(0), s.rate(100)) == (0.1, EXACT(0.05, rel=1e-12))
    assert s.rate(200) == EXACT(0.0, abs=1e-15)
    assert s.rate(300) == s.rate(200)


def test_cyclic_golden() -> None:
    s = Cyclic(lr=0.2, epochs=200)
    assert s.rate(175) == EXACT(0.0416667, abs=5e-8)
    assert s.rate(40) == EXACT(0.1, rel=1e-12)
    assert s.rate(190) == EXACT(0.2 / 12, rel=1e-12)
    assert (s.rate(0), s.rate(80), s.rate(200), s.rate(201)) == (0.0, 0.2, 0.0, 0.0)


def test_constant() -> None:
    assert {Constant(lr=0.3, epochs=9).at(step, 4) for step in range(36)} == {0.3}


def torch_rates(*, lr: float, total: int, peak: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=total, pct_start=peak, cycle_momentum=False
    )
    rates = []
    for _ in range(total):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step() if len(rates) < total else None
    return rates


@pytest.mark.parametrize(("epochs", "steps"), [(10, 5), (30, 9), (1, 40)])
def test_one_cycle_is_torchs_from_the_top_on(epochs: int, steps: int) -> None:
    """Same number of steps T: equal for every step from p*T - 1, the top, to the end. Before the top torch divides
    the climb into p*T - 1 parts from share 0, we into p*T parts from share 1/(p*T)."""
    total, lr, peak = epochs * steps, 0.21, 0.3
    ours = [OneCycle(lr=lr, epochs=epochs, peak=peak).at(step, steps) for step in range(total)]
    theirs = torch_rates(lr=lr, total=total, peak=peak)
    top = math.ceil(peak * total) - 1
    assert ours[top:] == EXACT(theirs[top:], rel=1e-9)
    assert ours[top] == EXACT(lr, rel=1e-12)
    assert theirs[0] == EXACT(lr / 25, rel=1e-12)
    assert ours[0] > theirs[0]
    assert ours[-1] == EXACT(lr / 250_000, rel=1e-9)


@pytest.mark.parametrize(("epochs", "steps", "peak"), [(10, 5, 0.3), (30, 9, 0.3), (4, 25, 0.25), (1, 40, 0.5)])
def test_one_cycle_is_torchs_cycle_of_one_more_step_without_its_first(epochs: int, steps: int, peak: float) -> None:
    """The clock gives update i the time (i + 1)/n, so the rate lr/25 of time 0 is never used: our T values are
    values 1..T of torch's cycle of T + 1 steps with the top at its step p*T."""
    total, lr = epochs * steps, 0.4
    ours = [OneCycle(lr=lr, epochs=epochs, peak=peak).at(step, steps) for step in range(total)]
    theirs = torch_rates(lr=lr, total=total + 1, peak=(peak * total + 1) / (total + 1))
    assert ours == EXACT(theirs[1:], rel=1e-9)


def test_warmup_cosine_end_points() -> None:
    s = WarmupCosine(lr=0.1, epochs=20, warmup=4)
    assert (s.rate(0), s.rate(1), s.rate(2), s.rate(4)) == (0.0, 0.025, 0.05, 0.1)
    assert s.rate(12) == EXACT(0.05, rel=1e-12)
    assert s.rate(20) == EXACT(0.0, abs=1e-15)
    assert s.rate(21) == s.rate(20)
    assert WarmupCosine(lr=0.1, epochs=20, warmup=0).rate(10) == EXACT(Cosine(lr=0.1, epochs=20).rate(10), rel=1e-12)


@pytest.mark.parametrize(
    "s",
    [
        Cosine(lr=0.5, epochs=10),
        Cyclic(lr=0.5, epochs=10),
        Cyclic(lr=0.5, epochs=10, peak=0.13),
        OneCycle(lr=0.5, epochs=10),
        WarmupCosine(lr=0.5, epochs=10, warmup=2.5),
    ],
    ids=lambda s: type(s).__name__,
)
def test_continuous_within_bounds(s: Schedule) -> None:
    grid = [10 * i / 4000 for i in range(4001)]
    rates = [s.rate(t) for t in grid]
    assert all(0 <= r <= 0.5 for r in rates)
    # Slope of the steepest shape: the one-cycle and short cyclic climbs, below 0.5/1.3 epochs times pi/2.
    assert max(abs(b - a) for a, b in pairwise(rates)) < 0.5 / 1.3 * math.pi / 2 * 10 / 4000
    assert max(rates) == EXACT(0.5, rel=1e-5)


def test_zero_rate_stays_zero() -> None:
    for entry in SCHEDULES:
        assert {SCHEDULES.make(entry.name, lr=0.0, epochs=5).at(step, 4) for step in range(20)} == {0.0}, entry.name


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Constant(lr=-0.1, epochs=1), r"lr must be a number >= 0, got -0\.1"),
        (lambda: Constant(lr=math.nan, epochs=1), "lr must be a number >= 0, got nan"),
        (lambda: Constant(lr=math.inf, epochs=1), "lr must be a number >= 0, got inf"),
        (lambda: Constant(lr=0.1, epochs=1, clock="epochs"), "unknown clock 'epochs'; known: .*did you mean 'epoch'"),
        (lambda: Piecewise(lr=0.1, epochs=200, milestones=(150, 100)), r"milestones must rise.*got \[150, 100\]"),
        (lambda: Piecewise(lr=0.1, epochs=200, milestones=(100, 100)), "milestones must rise"),
        (lambda: Cyclic(lr=0.1, epochs=9, peak=1.0), r"peak is a fraction of training in \(0, 1\), got 1\.0"),
        (lambda: Cyclic(lr=0.1, epochs=9, peak=0), "peak is a fraction"),
        (lambda: WarmupCosine(lr=0.1, epochs=9, warmup=9), r"warmup must lie in \[0, epochs\), got 9 of 9 epochs"),
        (lambda: WarmupCosine(lr=0.1, epochs=9, warmup=-1), "warmup must lie"),
        (lambda: SCHEDULES.make("cosin", lr=0.1, epochs=9), "unknown schedule 'cosin'; .*did you mean 'cosine'"),
        (lambda: SCHEDULES.make("cosine", lr=0.1, epochs=9, peak=0.3), "unknown option of schedule 'cosine': 'peak'"),
    ],
)
def test_errors(build: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    "build",
    [
        lambda: OneCycle(lr=0.1, epochs=9, peak=1.0),
        lambda: OneCycle(lr=0.1, epochs=9, peak=1.5),
        lambda: OneCycle(lr=0.1, epochs=9, peak=-0.1),
        lambda: OneCycle(lr=0.1, epochs=9, start_divisor=0),
        lambda: OneCycle(lr=0.1, epochs=9, end_divisor=-1),
        lambda: Piecewise(lr=0.1, epochs=9, milestones=(-1,)),
        lambda: Piecewise(lr=0.1, epochs=9, factor=-0.1),
        lambda: Piecewise(lr=0.1, epochs=9, factor=math.nan),
    ],
    ids=["peak-1", "peak-1.5", "peak<0", "start-0", "end<0", "milestone<0", "factor<0", "factor-nan"],
)
def test_no_schedule_divides_by_zero_or_climbs_the_loss(build: Callable[[], Schedule]) -> None:
    """A rate that is negative, NaN or a division by zero must be refused with the recipe, not met in training."""
    with pytest.raises(ConfigError):
        build()
