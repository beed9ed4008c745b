"""The points a landscape is looked at."""

from __future__ import annotations

from dataclasses import dataclass

from flatrock.core.errors import ConfigError
from flatrock.core.numbers import is_finite

# More than this many points is a slip of the finger: a surface would have a million.
MOST = 1001


@dataclass(frozen=True, kw_only=True)
class Axis:
    """`points` numbers from -span to span at equal distances, with 0 exactly in the middle."""

    points: int = 21
    span: float = 1.0

    def __post_init__(self) -> None:
        points, span = self.points, self.span
        faults = []
        if isinstance(points, bool) or not isinstance(points, int) or not 3 <= points <= MOST or points % 2 == 0:
            faults.append(f"points must be an odd number from 3 to {MOST}, so that 0 is one of them, got {points!r}")
        if not (is_finite(span) and span > 0):
            faults.append(f"span must be a number above 0, got {span!r}")
        if faults:
            raise ConfigError("the grid of a landscape:", tuple(faults))

    @property
    def middle(self) -> int:
        """Which point is 0."""
        return self.points // 2

    @property
    def values(self) -> tuple[float, ...]:
        """The points; those left and right of the middle differ in sign alone, the last is the span itself."""
        last = self.points - 1
        return tuple(self.span * ((2 * i - last) / last) for i in range(self.points))
