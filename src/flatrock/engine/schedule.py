"""Learning-rate schedules: pure functions of the time t in epochs, and the clocks that say what t is.

The papers count time differently, and it changes which epochs run at which rate, so the clock is a named option:
`step` t = (step + 1)/steps_per_epoch (Rice, AWP's AT code); `epoch` t = whole epochs done (from 0);
`epoch_from_1` t = the number of the current epoch (TRADES, RAT).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatrock.core.errors import ConfigError, TrainingError, shown
from flatrock.core.numbers import is_finite, is_number
from flatrock.core.own import Own
from flatrock.core.registry import Registry, unknown

CLOCKS = ("step", "epoch", "epoch_from_1")


def time_at(step: int, steps_per_epoch: int, clock: str) -> float:
    """t for the update number `step` (from 0)."""
    if clock == "step":
        return (step + 1) / steps_per_epoch
    return step // steps_per_epoch + (1 if clock == "epoch_from_1" else 0)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A rate as a function of time; subclasses give the shape."""

    lr: float
    epochs: float
    clock: str = "step"

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise ConfigError(unknown("clock", self.clock, CLOCKS))
        for name, value in vars(self).items():
            if name not in ("clock", "milestones", "function", "options") and not is_number(value):
                raise ConfigError(f"{name} must be a number, got {value!r}")
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ConfigError(f"lr must be a number >= 0, got {self.lr!r}")

    def rate(self, t: float) -> float:
        """Learning rate at time t (in epochs)."""
        raise NotImplementedError

    def at(self, step: int, steps_per_epoch: int) -> float:
        """Learning rate of the update number `step` (from 0)."""
        t = time_at(step, steps_per_epoch, self.clock)
        rate = self.rate(t)
        if not (is_finite(rate) and rate >= 0):
            raise TrainingError(f"the schedule gives the rate {shown(rate)} at time {t:g}; it must be a number >= 0")
        return rate


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """lr."""

    def rate(self, t: float) -> float:
        """Always lr."""
        return self.lr


@dataclass(frozen=True, kw_only=True)
class Piecewise(Schedule):
    """lr * factor^(number of milestones <= t)."""

    milestones: Sequence[float] = (100, 150)
    factor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = isinstance(self.milestones, list | tuple)
        if not listed or not all(is_number(m) and abs(m) < math.inf for m in self.milestones):
            raise ConfigError(f"milestones must be numbers, got {self.milestones!r}; write a list such as [100, 150]")
        rising = all(a < b for a, b in zip(self.milestones, self.milestones[1:], strict=False))
        if not rising or any(m < 0 for m in self.milestones):
            raise ConfigError(f"milestones must rise from 0 on, got {list(self.milestones)}")
        if not 0 <= self.factor <= 1:
            raise ConfigError(f"factor must lie in [0, 1], got {self.factor!r}")

    def rate(self, t: float) -> float:
        """Drop by `factor` at every milestone."""
        return self.lr * self.factor ** sum(t >= m for m in self.milestones)


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """lr/2 * (1 + cos(pi t/E))."""

    def rate(self, t: float) -> float:
        """From lr to 0 along half a cosine."""
        return self.lr / 2 * (1 + math.cos(math.pi * min(t / self.epochs, 1.0)))


@dataclass(frozen=True, kw_only=True)
class Cyclic(Schedule):
    """Linear 0 -> lr at peak*E -> 0 at E."""

    peak: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_peak(self.peak)

    def rate(self, t: float) -> float:
        """A triangle with its top at peak*E."""
        top = self.peak * self.epochs
        share = t / top if t < top else (self.epochs - t) / (self.epochs - top)
        return self.lr * max(share, 0.0)


@dataclass(frozen=True, kw_only=True)
class OneCycle(Schedule):
    """Cosine lr/25 -> lr over the first `peak` of training, then cosine lr -> lr/250,000 (Smith's one-cycle)."""

    peak: float = 0.3
    start_divisor: float = 25.0
    end_divisor: float = 1e4

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_peak(self.peak)
        if not (self.start_divisor >= 1 and self.end_divisor >= 1):
            raise ConfigError(f"divisors must be at least 1, got {self.start_divisor!r} and {self.end_divisor!r}")

    def rate(self, t: float) -> float:
        """Half a cosine up, half a cosine down."""
        first = self.lr / self.start_divisor
        top = self.peak * self.epochs
        if t < top:
            return _half_cosine(first, self.lr, t / top)
        return _half_cosine(self.lr, first / self.end_divisor, min((t - top) / (self.epochs - top), 1.0))


@dataclass(frozen=True, kw_only=True)
class WarmupCosine(Schedule):
    """Linear 0 -> lr over `warmup` epochs, then half a cosine to 0."""

    warmup: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.warmup < self.epochs:
            raise ConfigError(f"warmup must lie in [0, epochs), got {self.warmup!r} of {self.epochs} epochs")

    def rate(self, t: float) -> float:
        """Up a line, down a cosine."""
        if t < self.warmup:
            return self.lr * t / self.warmup
        return _half_cosine(self.lr, 0.0, min((t - self.warmup) / (self.epochs - self.warmup), 1.0))


@dataclass(frozen=True, kw_only=True)
class Written(Schedule):
    """A function of the user's: function(t, **options); it gets `lr` and `epochs`, too, if it takes them."""

    function: Callable[..., float]
    options: Mapping[str, Any] = field(default_factory=dict)

    def rate(self, t: float) -> float:
        """What the function says."""
        return self.function(t, **self.options)


def _written(function: Callable[..., float], options: dict[str, Any]) -> Schedule:
    shared = {key: value for key, value in options.items() if key in ("lr", "epochs", "clock")}
    taken = {key: value for key, value in options.items() if key in inspect.signature(function).parameters}
    return Written(function=function, options=taken, **shared)


def _check_peak(peak: float) -> None:
    if not 0 < peak < 1:
        raise ConfigError(f"peak is a fraction of training in (0, 1), got {peak!r}")


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


OWN = Own[Schedule](
    "a schedule",
    "`def warm(t: float, *, lr: float, epochs: float) -> float`, t in epochs, or a class that derives from "
    "flatrock.engine.schedule.Schedule",
    calls={"rate": "t"},
    base=Schedule,
    returns=float,
    given=("lr", "epochs"),
    asked="t",
    wrapped=_written,
    also=("clock",),
)
SCHEDULES: Registry[Schedule] = Registry("schedule", OWN)
SCHEDULES.add("constant", Constant, "the same rate throughout")
SCHEDULES.add("piecewise", Piecewise, "drops by a factor at milestones (the papers' 100/150)")
SCHEDULES.add("cosine", Cosine, "half a cosine from lr to 0")
SCHEDULES.add("cyclic", Cyclic, "a triangle, top at 0.4 of training")
SCHEDULES.add("one_cycle", OneCycle, "cosine up to lr, cosine down to almost 0", cite="Smith 2018")
SCHEDULES.add("warmup_cosine", WarmupCosine, "linear warm-up, then half a cosine to 0")
