"""Weight landscapes: the adversarial loss along one filter-normalised direction, or over the plane of two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from flatrock.core.borrow import borrowed, nudged
from flatrock.core.hooks import Shift
from flatrock.core.progress import Progress
from flatrock.core.rng import Seed
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.landscape import combined, filter_direction, movable
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.probe import Probe

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
) -> None:
    """Fill the ledger with rho(w + a d) for `count` directions d, or rho(w + a d + b e) for as many pairs (d, e).

    Adversarial inputs are made anew at every point with the same random numbers. What the ledger holds is not measured
    again. The weights and buffers come back bit by bit, after an error too.
    """
    names = movable(model)
    with borrowed(model, probe.x.device):
        probe.check()
        if ledger.get(MIDDLE) is None:
            ledger.put(MIDDLE, probe().to_dict())
            progress.advance(1, "middle")
        for k in range(count):
            todo = [(key, amounts) for key, amounts in places(axis, k, dimensions) if ledger.get(key) is None]
            directions = draw_directions(model, seed, k, dimensions, names) if todo else []
            for key, amounts in todo:
                with nudged(model, combined(directions, amounts)):
                    reading = probe()
                ledger.put(key, reading.to_dict())
                where = ", ".join(f"{amount:+.2f}" for amount in amounts)
                progress.advance(1, f"direction {k + 1}/{count}  at {where}  loss {reading.loss:.3f}")


def draw_directions(model: nn.Module, seed: Seed, k: int, dimensions: int, names: Sequence[str]) -> list[Shift]:
    """The k-th direction, or pair of them; the first of a pair is the k-th direction."""
    return [filter_direction(model, seed.child("direction", k, d), names) for d in range(dimensions)]


def places(axis: Axis, k: int, dimensions: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """The points of the k-th direction or pair without the middle: the key of each and how far along it lies."""
    values = axis.values
    for i in range(axis.points):
        for j in range(axis.points) if dimensions == 2 else (axis.middle,):
            if (i, j) != (axis.middle, axis.middle):
                yield place(k, i, j if dimensions == 2 else None), (values[i], values[j])[:dimensions]


def place(k: int, i: int, j: int | None = None) -> str:
    """The key of a point."""
    return f"{k}/{i}" if j is None else f"{k}/{i}/{j}"
