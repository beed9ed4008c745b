"""Weight landscapes: the adversarial loss along one filter-normalised direction, or over the plane of two."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from flatrock.core.borrow import borrowed, nudged, placed
from flatrock.core.hooks import Shift
from flatrock.core.progress import Progress
from flatrock.core.rng import Seed
from flatrock.core.workers import Work, parcel, pickled, workers
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.landscape import combined, filter_direction, movable
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.probe import Probe, Reading
from flatrock.diagnostics.surface import Array

MIDDLE = "middle"


def weight_points(axis: Axis, *, count: int, dimensions: int) -> int:
    """How many points are measured: the middle is the same for all directions, so once."""
    each: int = axis.points**dimensions
    return 1 + count * (each - 1)


def walk_weights(
    model: nn.Module,
    probe: Probe,
    axis: Axis,
    *,
    count: int,
    dimensions: int,
    seed: Seed,
    ledger: Ledger,
    progress: Progress,
    devices: Sequence[torch.device] = (),
) -> None:
    """Fill the ledger with rho(w + a d) for `count` directions d, or rho(w + a d + b e) for as many pairs (d, e).

    Adversarial inputs are made anew at every point with the same random numbers. What the ledger holds is not measured
    again. The weights and buffers come back bit by bit, after an error too. Several `devices` share the points, each in
    a process of its own.
    """
    walk = _Walk(model, probe, seed, dimensions, movable(model))
    points = [Point(MIDDLE, 0, ()), *(point for k in range(count) for point in places(axis, k, dimensions))]
    todo = [point for point in points if ledger.get(point.key) is None]
    sharing = devices[: len(todo)]
    with borrowed(model, probe.x.device):
        probe.check()
        made = _together(walk, todo, sharing) if len(sharing) > 1 else _alone(walk, todo)
        with closing(made):
            for place, reading in made:
                point = todo[place]
                ledger.put(point.key, reading.to_dict())
                where = ", ".join(f"{amount:+.2f}" for amount in point.amounts)
                told = f"direction {point.k + 1}/{count}  at {where}  loss {reading.loss:.3f}" if where else point.key
                progress.advance(1, told)


@dataclass(frozen=True)
class Point:
    """A place of the landscape: its key, and how far along the k-th direction or pair it lies; the middle nowhere."""

    key: str
    k: int
    amounts: tuple[float, ...]


@dataclass(frozen=True)
class _Walk:
    """Who is asked, and where directions come from."""

    model: nn.Module
    probe: Probe
    seed: Seed
    dimensions: int
    names: Sequence[str]
    _drawn: dict[int, list[Shift]] = field(default_factory=dict)  # of one k: those of a large network take memory

    def reading(self, point: Point) -> Reading:
        """What the data say of the weights at a point."""
        if not point.amounts:
            return self.probe()
        if point.k not in self._drawn:
            self._drawn.clear()
            self._drawn[point.k] = draw_directions(self.model, self.seed, point.k, self.dimensions, self.names)
        with nudged(self.model, combined(self._drawn[point.k], point.amounts)):
            return self.probe()


Readings = Generator[tuple[int, Reading], None, None]


def _alone(walk: _Walk, todo: Sequence[Point]) -> Readings:
    """Points by their place, one after the other."""
    for place, point in enumerate(todo):
        yield place, walk.reading(point)


def _together(walk: _Walk, todo: Sequence[Point], devices: Sequence[torch.device]) -> Readings:
    """The same from a process on each device, as they come."""
    with placed(walk.model, torch.device("cpu")):
        orders = pickled(replace(walk, probe=walk.probe.sent(parcel)))
    with workers(_walking, orders, devices) as at_work:
        yield from at_work.answers(todo)


@contextmanager
def _walking(walk: _Walk, device: torch.device) -> Iterator[tuple[None, Work]]:
    """In such a process: how a point is measured."""
    there = replace(walk, probe=walk.probe.sent(lambda tensor: tensor.to(device)))
    with placed(walk.model, device), borrowed(walk.model, device):
        yield None, lambda point, tell: there.reading(point)


def draw_directions(model: nn.Module, seed: Seed, k: int, dimensions: int, names: Sequence[str]) -> list[Shift]:
    """The k-th direction, or pair of them; the first of a pair is the k-th direction."""
    return [filter_direction(model, seed.child("direction", k, d), names) for d in range(dimensions)]


def places(axis: Axis, k: int, dimensions: int) -> Iterator[Point]:
    """The points of the k-th direction or pair without the middle."""
    values = axis.values
    for i in range(axis.points):
        for j in range(axis.points) if dimensions == 2 else (axis.middle,):
            if (i, j) != (axis.middle, axis.middle):
                yield Point(place(k, i, j if dimensions == 2 else None), k, (values[i], values[j])[:dimensions])


def place(k: int, i: int, j: int | None = None) -> str:
    """The key of a point."""
    return f"{k}/{i}" if j is None else f"{k}/{i}/{j}"


def weight_values(ledger: Ledger, axis: Axis, *, count: int, dimensions: int) -> dict[str, Array]:
    """What a full ledger holds, as arrays over directions and points; NaN where there was no finite value."""
    shape = (count, *[axis.points] * dimensions)
    values = {name: np.full(shape, np.nan) for name in ledger[MIDDLE]}
    for at in np.ndindex(*shape):
        middle = all(i == axis.middle for i in at[1:])
        reading = ledger[MIDDLE if middle else place(*at)]
        for name, array in values.items():
            array[at] = np.nan if reading[name] is None else reading[name]
    return values
