"""What training is to cost, from a file: rows to reach, and which measurement counts for which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatrock.core.costs import Bench, Estimate, StepCost
from flatrock.reports.given import read_given

# Bytes of a GiB in GB, the unit of the targets.
GIB = 2**30 / 1e9
# The measures of a row as the page names them.
MEASURES = {
    "seconds": "s/epoch",
    "gigabytes": "memory, GB",
    "time_ratio": "time over base",
    "memory_ratio": "memory over base",
}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One measure of a row: what others took, and what ours may take at most. A row may only be shown."""

    target: float | None = None
    authors: float | None = None
    prototype: float | None = None


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One training to be timed; `flatness` is the method it has, with the options that must be these."""

    label: str
    model: str
    objective: str
    attack: str
    flatness: Mapping[str, Any] = field(default_factory=dict)
    above_zero: tuple[str, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """What a paper prints about one training: time per epoch in its unit, and memory, where it prints that.

    `kind` says which of our measurements are of the same.
    """

    kind: SpeedRow
    epoch: float
    megabytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Published:
    """A table of a paper, its base first; `unit` of its times, empty if it names none."""

    cite: str
    text: str
    unit: str
    rows: tuple[PublishedRow, ...]


@dataclass(frozen=True, kw_only=True)
class SpeedTargets:
    """All rows, what every measurement must agree in to count, and what papers print."""

    source: str
    device: str
    batch_size: int
    attack_steps: int
    bn_mode: str
    epoch_steps: int
    rows: tuple[SpeedRow, ...]
    published: tuple[Published, ...] = ()

    def fits(self, row: SpeedRow, bench: Bench, cost: StepCost) -> bool:
        """Whether this measurement is one of the row."""
        attack = {"name": row.attack, "steps": self.attack_steps, "bn_mode": self.bn_mode}
        known = (cost.model, cost.objective, cost.batch_size, dict(cost.attack))
        if (
            known != (row.model, row.objective, self.batch_size, attack)
            or self.device not in bench.provenance["device"]
        ):
            return False
        if not row.flatness or not cost.flatness:
            return not row.flatness and not cost.flatness
        method = cost.flatness[0]
        alike = all(method.get(key) == value for key, value in row.flatness.items())
        return alike and len(cost.flatness) == 1 and all(method.get(key, 0) > 0 for key in row.above_zero)

    def measure(self, name: str, bench: Bench, cost: StepCost) -> Estimate | None:
        """What was measured of it, or None; memory has no interval."""
        base = bench.base(cost)
        if name == "seconds":
            return cost.step.times(self.epoch_steps / 1000)
        if name == "gigabytes":
            return None if cost.memory_gib is None else Estimate(GIB * cost.memory_gib, None)
        if name == "time_ratio":
            return None if base is None else cost.over(base)
        if base is None or not base.memory_gib or cost.memory_gib is None:
            return None
        return Estimate(cost.memory_gib / base.memory_gib, None)


def read_targets(path: Path) -> SpeedTargets:
    """Read the file; ConfigError says what in it is wrong."""
    return read_given(path, _targets, what="speed targets", option="--targets")


def _targets(raw: Mapping[str, Any]) -> SpeedTargets:
    rows, published = map(_row, raw["rows"]), map(_published, raw.get("published", ()))
    return SpeedTargets(**{**raw, "rows": tuple(rows), "published": tuple(published)})


def _published(raw: Mapping[str, Any]) -> Published:
    return Published(**{**raw, "rows": tuple(_printed(row) for row in raw["rows"])})


def _printed(raw: Mapping[str, Any]) -> PublishedRow:
    numbers = {key: float(raw[key]) for key in ("epoch", "megabytes") if key in raw}
    kind = {key: value for key, value in raw.items() if key not in numbers}
    return PublishedRow(kind=_row(kind), **numbers)


def _row(raw: Mapping[str, Any]) -> SpeedRow:
    limits = {name: Limit(**{k: float(v) for k, v in raw[name].items()}) for name in MEASURES if name in raw}
    rest = {key: value for key, value in raw.items() if key not in limits}
    return SpeedRow(**{**rest, "above_zero": tuple(raw.get("above_zero", ())), "limits": limits})
