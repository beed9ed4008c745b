"""What became of the papers' claims: differences measured here, paired by test sample, beside theirs, in sentences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt

from flatrock.core.gaps import Gap, mean_paired
from flatrock.core.rows import Row, Score
from flatrock.reports.papers import Figure, Measure, Protocol

LIKE, LARGER, SMALLER = "reproduced", "the same sign, far larger", "the same sign, far smaller"
OPEN = "undecided, chance allows both 0 and theirs"
NOT, OPPOSITE = "not reproduced, no difference beyond chance", "contradicted"
NONE = "no claim, it is within the paper's own error"
WORDS = (LIKE, LARGER, SMALLER, OPEN, NOT, OPPOSITE, NONE)


@dataclass(frozen=True)
class Verdict:
    """One claim in one measure: the paper's difference in points and ours."""

    measure: str
    theirs: float
    ours: Gap
    doubtful: bool  # the paper's difference is less than twice its own standard error, or none at all

    @property
    def word(self) -> str:
        """Reproduced: beyond chance, the same sign, and half to twice the size give or take what chance reaches."""
        if self.doubtful:
            return NONE
        size, ours, chance = abs(self.theirs), 100 * abs(self.ours.mean), 100 * self.ours.reach * self.ours.error
        if not self.ours.beyond_chance:
            return OPEN if abs(100 * self.ours.mean - self.theirs) <= chance else NOT
        if (self.ours.mean > 0) != (self.theirs > 0):
            return OPPOSITE
        if ours + chance < size / 2:
            return SMALLER
        return LARGER if ours - chance > 2 * size else LIKE

    def text(self, name: str) -> str:
        """`PGD-20 +2.60 there, +1.9 ± 0.4 here: reproduced`."""
        return f"{name} {self.theirs:+.2f} there, {points(self.ours)} here: {self.word}"


def points(gap: Gap) -> str:
    """A gap in points with its standard error."""
    return f"{100 * gap.mean:+.2f} ± {100 * gap.error:.2f}"


def by_recipe(rows: Sequence[Row], *, on_test: bool = False) -> dict[str, dict[int, Row]]:
    """The runs that may be compared, by recipe and seed: those that held images out, or those chosen on the test set.

    The two are never compared with each other.
    """
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.on_test if on_test else row.comparable:
            found.setdefault(row.recipe, {})[row.seed] = row
    return found


def score_at(row: Row, end: str) -> Score | None:
    """The evaluation of the best or the last epoch, of the averaged weights where the run is known by those."""
    return row.scores.get((row.main or "").replace("best", end))


def value(score: Score, measure: Measure, *, first: int = 0) -> float | None:
    """Under the attack that counts as the measure: percent, or a distance; of the `first` samples, if not 0."""
    figures = score.figures
    name = next((name for name in measure.attacks if name in figures), None)
    flags = score.verdicts.get(name or "")
    if name is None or flags is None or not first or len(flags) != score.n:  # a distance, or part of the test set
        return None if name is None else figures[name]
    return 100 * float(flags[:first].double().mean())


def gain(one: Mapping[int, Row], other: Mapping[int, Row], measure: Measure, end: str = "best") -> Gap | None:
    """How much better one recipe is than another, the mean over the seeds both were trained with."""
    seeds = sorted(one.keys() & other.keys())
    return _mean([(score_at(one[s], end), score_at(other[s], end)) for s in seeds], measure)


def drop(runs: Mapping[int, Row], measure: Measure) -> Gap | None:
    """The last epoch minus the best, the mean over the seeds."""
    return _mean([(score_at(row, "last"), score_at(row, "best")) for row in runs.values()], measure)


def _mean(pairs: Sequence[tuple[Score | None, Score | None]], measure: Measure) -> Gap | None:
    """Of differences under one and the same attack."""
    found = []
    for a, b in [(a.verdicts, b.verdicts) for a, b in pairs if a is not None and b is not None]:
        name = next((name for name in measure.attacks if name in a and name in b), None)
        found += [] if name is None else [(a[name], b[name])]
    return mean_paired(found) if found else None


def verdicts(pair: tuple[Figure, Figure], ours: Mapping[str, Gap | None]) -> list[Verdict]:
    """One for every measure both figures and we have."""
    new, old = pair
    found = []
    for measure, gap in ours.items():
        if gap is not None and measure in new.values and measure in old.values:
            theirs = new.values[measure] - old.values[measure]
            doubtful = theirs == 0 or abs(theirs) < 2 * _own_error(pair, measure, gap)
            found.append(Verdict(measure, theirs, gap, doubtful))
    return found


def _own_error(pair: tuple[Figure, Figure], measure: str, ours: Gap) -> float:
    """The standard error of the paper's difference, in points, as far as it is known; else 0.

    Of two figures of so many samples it is about what ours would be on as many: they are paired, too.
    """
    errors = [figure.errors[measure] for figure in pair if measure in figure.errors]
    if len(errors) == 2:
        return hypot(*errors)
    one, other = (figure.samples.get(measure, 0) for figure in pair)
    return 100 * ours.error * sqrt(ours.samples / one) if one and one == other else 0.0


@dataclass(frozen=True)
class Claim:
    """A difference a paper prints between two of its rows, and what became of it here, measure by measure."""

    what: str
    pair: tuple[Figure, Figure]
    verdicts: Sequence[Verdict]

    def sentence(self, protocol: Protocol) -> str:
        """All of it."""
        said = "; ".join(v.text(protocol.measures[v.measure].name) for v in self.verdicts)
        new, old = self.pair[0].where, self.pair[1].where
        return f"- {self.what} ({new if new == old else f'{new}; {old}'}): {said}."


def claims(protocol: Protocol, rows: Sequence[Row], *, on_test: bool = False) -> list[Claim]:
    """Every difference a paper prints between rows that were both measured here.

    Of rows chosen on the test set, those of papers that chose so, with a `*`.
    """
    known, star = by_recipe(rows, on_test=on_test), "*" if on_test else ""
    found = []
    for name, entry in protocol.rows.items():
        if entry.over is not None and name in known and entry.over in known:
            what = f"{entry.label}{star} minus {protocol.rows[entry.over].label}{star}"
            for pair in (pair for pair in entry.claims if beside_rows(*pair, on_test=on_test)):
                ours = {
                    key: gain(known[name], known[entry.over], m, pair[0].end) for key, m in protocol.measured.items()
                }
                found.append(Claim(what, pair, verdicts(pair, ours)))
        if name in known:
            lost = {key: drop(known[name], m) for key, m in protocol.measured.items()}
            for best, last in (pair for pair in entry.drops if beside_rows(*pair, on_test=on_test)):
                what = f"{entry.label}{star}, last epoch minus best"
                found.append(Claim(what, (last, best), verdicts((last, best), lost)))
    return [claim for claim in found if claim.verdicts]


def beside_rows(*figures: Figure, on_test: bool) -> bool:
    """Whether figures may be set beside rows: beside any that held images out, beside others if they were chosen so."""
    return not on_test or all(figure.on_test for figure in figures)


def claim_lines(protocol: Protocol, rows: Sequence[Row], *, on_test: bool = False) -> list[str]:
    """A sentence for each of them."""
    return [claim.sentence(protocol) for claim in claims(protocol, rows, on_test=on_test)]


def tally_lines(protocol: Protocol, rows: Sequence[Row], *, on_test: bool = False) -> list[str]:
    """For each word of a verdict, how many differences have it, and which."""
    said: dict[str, dict[str, list[str]]] = {}
    for claim in claims(protocol, rows, on_test=on_test):
        ends = {figure.end for figure in claim.pair}
        what = claim.what + (", last epoch" if ends == {"last"} else "")
        for verdict in claim.verdicts:
            name = protocol.measures[verdict.measure].name
            said.setdefault(verdict.word, {}).setdefault(what, []).append(name)
    lines = []
    for word in sorted(said, key=WORDS.index):
        which = "; ".join(f"{what}: {', '.join(dict.fromkeys(names))}" for what, names in said[word].items())
        lines.append(f"{sum(map(len, said[word].values()))} {word} ({which})")
    return lines


def more_differences(protocol: Protocol, names: Collection[str], *, on_test: bool = False) -> str:
    """Recipes without which some differences that papers print about these cannot be judged; nothing without any."""
    missing: dict[str, int] = {}
    for name, entry in protocol.rows.items():
        pairs = [pair for pair in entry.claims if beside_rows(*pair, on_test=on_test)]
        if name in names and pairs and entry.over is not None and entry.over not in names:
            missing[entry.over] = missing.get(entry.over, 0) + len(pairs)
    return "; ".join(f"name {name} too for {count} more" for name, count in missing.items())


def outlook(protocol: Protocol, names: Collection[str], *, on_test: bool = False) -> str:
    """What papers print about these recipes, and what they would with others; nothing if nothing."""
    rows = {name: entry for name, entry in protocol.rows.items() if name in names}
    claims = [pair for entry in rows.values() if entry.over in names for pair in entry.claims]
    pairs = [*claims, *(pair for entry in rows.values() for pair in entry.drops)]
    differences = sum(beside_rows(*pair, on_test=on_test) for pair in pairs)
    beside = sum(any(beside_rows(f, on_test=on_test) for f in entry.papers) for entry in rows.values())
    said = [f"papers print figures for {beside} of the rows, differences: {differences}"] if beside else []
    return "; ".join(filter(None, [*said, more_differences(protocol, names, on_test=on_test)]))


def target_lines(name: str, protocol: Protocol, rows: Sequence[Row]) -> list[str]:
    """Whether a row reached what it should."""
    entry, names = protocol.rows[name], {key: measure.name for key, measure in protocol.measures.items()}
    lines = []
    for seed, row in sorted(by_recipe(rows).get(name, {}).items()):
        score = row.scores[row.main or ""]
        shares = {key: value(score, measure) for key, measure in protocol.measured.items()}
        found = {key: share for key, share in shares.items() if share is not None}
        error = {key: sqrt(share * (100 - share) / score.n) for key, share in found.items()}
        for target in entry.targets:
            misses = [m for m, least in target.values.items() if found.get(m, 0.0) < least]
            asked = " and ".join(f"{names[m]} {v:.2f}" for m, v in target.values.items())
            reached = [m for m in target.values if m in found]
            had = " and ".join(f"{names[m]} {found[m]:.2f} ± {error[m]:.2f}" for m in reached)
            near = [m for m in reached if abs(found[m] - target.values[m]) < 2 * error[m]]
            verdict = f"missed in {' and '.join(names[m] for m in misses)}" if misses else "reached"
            if near:
                verdict += f" ({' and '.join(names[m] for m in near)} within two standard errors)"
            lines.append(f"- {entry.label} (seed {seed}) against {target.name}, {asked}: {had}, {verdict}.")
    return lines
