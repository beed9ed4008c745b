"""Which measurements of `flatrock bench` count for a row: those of the newest file that knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flatrock.core.costs import Bench, Estimate, StepCost
from flatrock.reports.speed_targets import SpeedRow, SpeedTargets


@dataclass(frozen=True)
class Found:
    """A measurement that counts for a row, and the file it is in."""

    file: str
    cost: StepCost
    ours: Estimate


def found(targets: SpeedTargets, row: SpeedRow, measure: str, files: Mapping[str, Bench]) -> list[Found]:
    """What the newest file that knows it says about a measure of a row; several recipes of it may fit."""
    for name, bench in files.items():
        fitting = [cost for cost in bench.costs if targets.fits(row, bench, cost)]
        known = [(cost, targets.measure(measure, bench, cost)) for cost in fitting]
        if here := [Found(name, cost, ours) for cost, ours in known if ours is not None]:
            return here
    return []


def told(estimate: Estimate) -> str:
    """The number, and its interval if there is one."""
    low_high = "" if estimate.interval is None else f" ({estimate.interval[0]:.3f} to {estimate.interval[1]:.3f})"
    return f"{estimate.value:.3f}{low_high}"
