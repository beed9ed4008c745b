"""Settings of a sweep minus the first of them: paired by seed and by test sample, beyond chance or not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from flatrock.core.gaps import Gap, mean_paired, paired
from flatrock.core.rows import WORST, Row
from flatrock.reports.claims import points
from flatrock.reports.compare import BEYOND
from flatrock.reports.table import Table

# With more lines than so many, those of single seeds would hide the means.
LINES = 60


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting minus the `base`, in fractions, over the `seeds` whose runs can be compared, of `wanted`.

    `gaps` are the means by measure, with the chance of seeds and of test samples; of one seed, with that of test
    samples alone. `by_seed` has the difference of each seed. `starred`: epochs were chosen on the test set. `left_out`
    says why runs that are there are not compared, by seed; `unlike` are attacks that were not asked alike.
    """

    values: Mapping[str, str]
    base: Mapping[str, str]
    wanted: int
    seeds: tuple[int, ...] = ()
    gaps: Mapping[str, Gap] = field(default_factory=dict)
    by_seed: Mapping[str, tuple[Gap, ...]] = field(default_factory=dict)
    starred: bool = False
    left_out: Mapping[int, str] = field(default_factory=dict)
    unlike: tuple[str, ...] = ()


def gaps_of(
    pairs: Sequence[tuple[Row, Row]], leave_out: Collection[str] = ()
) -> tuple[dict[str, Gap], dict[str, tuple[Gap, ...]]]:
    """The mean difference of each measure that all of these rows have, and that of each pair, one for each seed."""
    found = [(_verdicts(a), _verdicts(b)) for a, b in pairs]
    names = [name for name in (found[0][0] if found else ()) if name not in leave_out]
    names = [name for name in names if all(name in right for pair in found for right in pair)]
    means = {name: mean_paired([(a[name], b[name]) for a, b in found]) for name in names}
    return means, {name: tuple(paired(a[name], b[name]) for a, b in found) for name in names}


def difference_table(found: Sequence[Difference]) -> Table:
    """In points: a line for each seed, and below them their mean ± its standard error."""
    keys = list(found[0].values) if found else []
    names = dict.fromkeys(name for one in found for name in one.gaps)
    measures = sorted(names, key=lambda name: (name == WORST, name != "clean"))
    each = sum(len(one.seeds) + 1 for one in found) <= LINES
    lines: list[tuple[str, ...]] = []
    for one in found:
        said, star = tuple(one.values[key] for key in keys), "*" * one.starred
        for nth, seed in enumerate(one.seeds if each and len(one.seeds) > 1 else ()):
            cells = [f"{100 * one.by_seed[n][nth].mean:+.2f}{star}" if n in one.by_seed else "" for n in measures]
            lines.append((*said, f"seed {seed}", *cells))
        means = {name: points(gap) + star + BEYOND * gap.beyond_chance for name, gap in one.gaps.items()}
        lines.append((*said, _seeds(one), *(means.get(name, "") for name in measures)))
    return Table((*keys, "seeds", *measures), tuple(lines))


def _verdicts(row: Row) -> dict[str, Tensor]:
    """Which samples are right, by measure; WORST is of the recipe's own evaluation, as everywhere."""
    assert row.main is not None
    score = row.scores[row.main]
    return {**score.verdicts, WORST: score.worst}


def _seeds(one: Difference) -> str:
    """What a line of means is of."""
    if len(one.seeds) == 1:
        return f"seed {one.seeds[0]} alone"
    if not one.seeds:
        return f"none of {one.wanted}"
    return f"mean of {len(one.seeds)}" + (f" of {one.wanted}" if len(one.seeds) < one.wanted else "")
