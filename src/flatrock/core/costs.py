"""What training steps cost: the records `flatrock bench` writes, and how two recipes of one file compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flatrock.core.files import read_record

SCHEMA = "flatrock.bench/2"


@dataclass(frozen=True)
class Estimate:
    """A median and the interval that holds it with 95 %; there is none for fewer than 6 rounds."""

    value: float
    interval: tuple[float, float] | None

    def times(self, factor: float) -> Estimate:
        """The same in other units."""
        scaled = None if self.interval is None else (factor * self.interval[0], factor * self.interval[1])
        return Estimate(factor * self.value, scaled)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One recipe: what was trained, and medians over the rounds; `ratio` is to the first recipe of the file.

    `flatness` holds the methods with all their options, `attack` its name, steps and bn_mode. `kernels_ms` is what a
    GPU spends of a step on each kind of kernel; the rest of ms_per_step it waits. `launch_ms` is what the processor
    takes to ask an idle GPU for a step.
    """

    recipe: str
    model: str
    batch_size: int
    steps_per_epoch: int
    objective: str
    flatness: tuple[Mapping[str, Any], ...]
    attack: Mapping[str, Any]
    ms_per_step: float
    images_per_second: float
    seconds_per_epoch: float
    tflops: float
    share_of_ceiling: float
    memory_gib: float | None  # held on the GPU while it trains, kernels chosen and nothing else there; None on a CPU
    attack_ms: float | None  # crafting alone; None without an attack
    kernels_ms: Mapping[str, float]  # empty on a CPU
    ratio: float
    interval: tuple[float, float] | None
    rounds_ms: tuple[float, ...]  # milliseconds per step of every round
    recipe_hash: str
    engine: Mapping[str, Any]
    launch_ms: float | None = None  # None on a CPU, and in older files
    findings: tuple[str, ...] = ()

    @property
    def step(self) -> Estimate:
        """Milliseconds per step."""
        return median(self.rounds_ms)

    def over(self, base: StepCost) -> Estimate:
        """Time relative to another recipe of the same file: rounds are paired, because machines drift."""
        return median([a / b for a, b in zip(self.rounds_ms, base.rounds_ms, strict=True)])

    def same_but_flatness(self, other: StepCost) -> bool:
        """Whether the recipes cost the same without their flatness methods."""
        keys = ("model", "batch_size", "objective", "attack")
        return all(getattr(self, key) == getattr(other, key) for key in keys)


@dataclass(frozen=True)
class Bench:
    """Costs in the order asked for, the matmul ceiling in TFLOP/s, and where the numbers come from."""

    costs: tuple[StepCost, ...]
    ceiling: float
    provenance: Mapping[str, Any]

    def base(self, cost: StepCost) -> StepCost | None:
        """The recipe of this file that is `cost` without its flatness methods, if possible on the same engine."""
        plain = [c for c in self.costs if not c.flatness and c.same_but_flatness(cost)]
        return min(plain, key=lambda c: c.engine != cost.engine, default=None) if cost.flatness else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Bench:
        """Inverse of to_dict; ValueError if the rounds do not fit the numbers made of them."""
        costs = tuple(_cost(c) for c in values["costs"])
        for c in costs:
            if len(c.rounds_ms) != len(costs[0].rounds_ms) or not math.isclose(c.step.value, c.ms_per_step):
                raise ValueError(f"the rounds of {c.recipe} do not give its {c.ms_per_step} ms per step")
        about = values["provenance"]
        if missing := {"device", "torch", "commit", "time", "rounds", "steps"} - about.keys():
            raise ValueError(f"no {sorted(missing)[0]} in its provenance")
        return cls(costs, float(values["ceiling"]), about)


def _cost(values: Mapping[str, Any]) -> StepCost:
    lists: dict[str, Any] = {key: tuple(values[key]) for key in ("flatness", "rounds_ms", "findings")}
    interval, crafting = values["interval"], values["attack_ms"]
    lists["attack_ms"] = None if crafting is None else float(crafting)
    launching = values.get("launch_ms")
    lists["launch_ms"] = None if launching is None else float(launching)
    lists["kernels_ms"] = {str(kind): float(ms) for kind, ms in values["kernels_ms"].items()}
    return StepCost(**{**values, **lists, "interval": None if interval is None else tuple(interval)})


def read_bench(path: Path) -> Bench | None:
    """The content of a file of `flatrock bench`, checked; None for a JSON file that is something else."""
    return read_record(path, SCHEMA, Bench.from_dict, "flatrock bench")


def median(values: Sequence[float]) -> Estimate:
    """The median with its interval of 95 %."""
    return Estimate(statistics.median(values), median_interval(sorted(values)))


def median_interval(ordered: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest pair of order statistics that holds the median with at least 95 %; the count below is binomial."""
    n, outside, k = len(ordered), 0.0, 0
    while k < n // 2 and (more := outside + math.comb(n, k) / 2**n) <= 0.025:
        outside, k = more, k + 1
    return (ordered[k - 1], ordered[n - k]) if k else None
