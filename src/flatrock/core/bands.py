"""What a recipe is expected to score: bands made of measured rows by one rule, and how far a row is outside of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, sqrt
from statistics import NormalDist, mean, variance

from flatrock.core.errors import StateError
from flatrock.core.rows import Row

# Lowest and highest, in percent of the test set; of each measure, `clean` or the name of an attack or plan.
Band = tuple[float, float]
Bands = Mapping[str, Band]
# A table of recipes has a hundred measures, so not more than one in a hundred should be outside by chance.
Z = NormalDist().inv_cdf(0.995)  # 2.576


def band(shares: Sequence[float], n: int) -> Band:
    """Where one more run of a recipe is expected that had these shares of n test samples right, one for each seed of k.

    mean ± z sqrt((1 + 1/k) (s² + e²)), z = 2.576, widened to whole tenths of a percent and cut at 0 and 100. s is the
    standard deviation over seeds, e the standard error a test set of this size leaves, sqrt(p (1 - p) / n); for it two
    samples more are right and two more wrong, so that it is not zero where all are. The s of few seeds is itself
    uncertain, which is why e is in the sum; of one seed there is none, and e takes its place.
    """
    k, centre = len(shares), mean(shares)
    p = (n * centre + 2) / (n + 4)
    test = p * (1 - p) / n
    seeds = variance(shares) if k > 1 else test
    half = Z * sqrt((1 + 1 / k) * (seeds + test))
    return max(floor(1000 * (centre - half)) / 10, 0.0), min(ceil(1000 * (centre + half)) / 10, 100.0)


def measured_bands(rows: Sequence[Row]) -> dict[str, dict[str, Band]]:
    """The bands that follow from the rows of which one can be made, by recipe; of the checkpoint a run is known by."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if not unfit(row):
            found.setdefault(row.recipe, []).append(row)
    return {recipe: _bands(recipe, group) for recipe, group in found.items()}


def unfit(row: Row) -> str:
    """Why no band is made of a row; nothing if one is."""
    reasons = {
        row.status: row.status != "finished",
        "changed": bool(row.changes),
        "not evaluated": row.main is None,
        "collapsed": row.collapsed,
        "averaged weights collapsed, and plain ones make no band of those": row.stands_in,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _bands(recipe: str, rows: Sequence[Row]) -> dict[str, Band]:
    scores = [row.scores[row.main] for row in rows if row.main]
    if len({row.seed for row in rows}) < len(rows):
        raise StateError(f"there are two rows of {recipe} with one seed; a band is of different seeds: leave one out")
    if len({score.n for score in scores}) > 1:
        raise StateError(f"rows of {recipe} are of test sets of different sizes; evaluate them alike")
    names = [name for name in scores[0].right if all(name in score.right for score in scores)]
    names = ["clean", *(name for name in names if name != "clean")]
    return {name: band([score.accuracy[name] for score in scores], scores[0].n) for name in names}


def off(share: float, expected: Band) -> float:
    """By how many points a share, in percent as tables print it, is above its band, or, negative, below; 0 inside."""
    value, (low, high) = round(100 * share, 2), expected
    return round(min(value - low, 0.0) + max(value - high, 0.0), 2)


def outside(row: Row, bands: Bands) -> dict[str, float]:
    """`off` for every measure of a row that has a band."""
    score = row.scores[row.main] if row.main else None
    found = {} if score is None else score.accuracy
    return {name: off(found[name], expected) for name, expected in bands.items() if name in found}


def missed(row: Row, bands: Bands) -> bool:
    """Whether some measure of a row is outside of its band, or the model collapsed, whose measures say nothing."""
    return row.collapsed or any(outside(row, bands).values())


def band_text(expected: Band) -> str:
    """(97.5, 99.0) -> '97.5-99'."""
    return f"{expected[0]:g}-{expected[1]:g}"


def bands_text(bands: Bands) -> str:
    """All of them in a line."""
    return ", ".join(f"{name} {band_text(expected)}" for name, expected in bands.items())
