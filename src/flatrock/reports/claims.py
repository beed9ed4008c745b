"""What became of the papers' claims: differences measured here, paired by test sample, beside theirs, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from flatrock.core.rows import Gap, Row, Score, mean_gap, paired
from flatrock.reports.papers import Entry, Figure, Papers, Protocol

NOT, OPPOSITE, SMALLER = "not reproduced, no difference beyond chance", "contradicted", "the same sign, far smaller"
LARGER, LIKE = "the same sign, far larger", "reproduced"
WORDS = (LIKE, LARGER, SMALLER, NOT, OPPOSITE)


@dataclass(frozen=True)
class Verdict:
    """One claim in one measure: the paper's difference in points and ours."""

    measure: str
    theirs: float
    ours: Gap
    doubtful: bool  # the paper's difference is less than twice its own standard error

    @property
    def word(self) -> str:
        """Reproduced: beyond chance, the same sign, and half to twice the size give or take two standard errors."""
        if not self.ours.beyond_chance:
            return NOT
        size, ours, error = abs(self.theirs), 100 * abs(self.ours.mean), 100 * self.ours.error
        if (self.ours.mean > 0) != (self.theirs > 0):
            return OPPOSITE
        if ours + 2 * error < size / 2:
            return SMALLER
        return LARGER if ours - 2 * error > 2 * size else LIKE

    def text(self, name: str) -> str:
        """`PGD-20 +2.60 there, +1.9 ± 0.4 here: reproduced`."""
        doubt = " (within its own error)" if self.doubtful else ""
        return f"{name} {self.theirs:+.2f} there{doubt}, {points(self.ours)} here: {self.word}"


def points(gap: Gap) -> str:
    """A gap in points with its standard error."""
    return f"{100 * gap.mean:+.2f} ± {100 * gap.error:.2f}"


def by_recipe(rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """The runs that may be compared, by recipe and seed."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.comparable:
            found.setdefault(row.recipe, {})[row.seed] = row
    return found


def score_at(row: Row, end: str) -> Score | None:
    """The evaluation of the best or the last epoch, of the averaged weights where the run is known by those."""
    return row.scores.get((row.main or "").replace("best", end))


def gain(one: Mapping[int, Row], other: Mapping[int, Row], measure: str, end: str = "best") -> Gap | None:
    """How much better one recipe is than another, the mean over the seeds both were trained with."""
    seeds = sorted(one.keys() & other.keys())
    return _mean([(score_at(one[s], end), score_at(other[s], end)) for s in seeds], measure)


def drop(runs: Mapping[int, Row], measure: str) -> Gap | None:
    """The last epoch minus the best, the mean over the seeds."""
    return _mean([(score_at(row, "last"), score_at(row, "best")) for row in runs.values()], measure)


def _mean(pairs: Sequence[tuple[Score | None, Score | None]], measure: str) -> Gap | None:
    whole = [(a.right, b.right) for a, b in pairs if a is not None and b is not None]
    gaps = [paired(a[measure], b[measure]) for a, b in whole if measure in a and measure in b]
    return mean_gap(gaps) if gaps else None


def verdicts(pair: tuple[Figure, Figure], ours: Mapping[str, Gap | None]) -> list[Verdict]:
    """One for every measure both figures and we have."""
    new, old = pair
    found = []
    for measure, gap in ours.items():
        if gap is not None and measure in new.values and measure in old.values:
            theirs = new.values[measure] - old.values[measure]
            doubtful = new.error is not None and abs(theirs) < 2 * sqrt(2) * new.error
            found.append(Verdict(measure, theirs, gap, doubtful))
    return found


@dataclass(frozen=True)
class Claim:
    """A difference a paper prints between two of its rows, and what became of it here, measure by measure."""

    what: str
    pair: tuple[Figure, Figure]
    verdicts: Sequence[Verdict]

    def sentence(self, papers: Papers) -> str:
        """All of it."""
        said = "; ".join(v.text(papers.measures[v.measure]) for v in self.verdicts)
        new, old = self.pair[0].where, self.pair[1].where
        return f"- {self.what} ({new if new == old else f'{new}; {old}'}): {said}."


def claims(protocol: Protocol, rows: Sequence[Row], papers: Papers) -> list[Claim]:
    """Every difference a paper prints between rows that were both measured here."""
    known = by_recipe(rows)
    found = []
    for name, entry in protocol.rows.items():
        if entry.over is not None and name in known and entry.over in known:
            what = f"{entry.label} minus {protocol.rows[entry.over].label}"
            for pair in entry.claims:
                ours = {m: gain(known[name], known[entry.over], m, pair[0].end) for m in papers.measures}
                found.append(Claim(what, pair, verdicts(pair, ours)))
        if name in known:
            lost = {m: drop(known[name], m) for m in papers.measures}
            for best, last in entry.drops:
                found.append(Claim(f"{entry.label}, last epoch minus best", (last, best), verdicts((last, best), lost)))
    return [claim for claim in found if claim.verdicts]


def claim_lines(protocol: Protocol, rows: Sequence[Row], papers: Papers) -> list[str]:
    """A sentence for each of them."""
    return [claim.sentence(papers) for claim in claims(protocol, rows, papers)]


def tally_lines(protocol: Protocol, rows: Sequence[Row], papers: Papers) -> list[str]:
    """For each word of a verdict, how many differences have it, and which."""
    said: dict[str, dict[str, list[str]]] = {}
    for claim in claims(protocol, rows, papers):
        ends = {figure.end for figure in claim.pair}
        what = claim.what + (", last epoch" if ends == {"last"} else "")
        for verdict in claim.verdicts:
            said.setdefault(verdict.word, {}).setdefault(what, []).append(papers.measures[verdict.measure])
    lines = []
    for word in sorted(said, key=WORDS.index):
        which = "; ".join(f"{what}: {', '.join(dict.fromkeys(names))}" for what, names in said[word].items())
        lines.append(f"{sum(map(len, said[word].values()))} {word} ({which})")
    return lines


def target_lines(name: str, entry: Entry, rows: Sequence[Row], papers: Papers) -> list[str]:
    """Whether a row reached what it should."""
    lines = []
    for seed, row in sorted(by_recipe(rows).get(name, {}).items()):
        score = row.scores[row.main or ""]
        accuracy = {m: 100 * share for m, share in score.accuracy.items()}
        error = {m: 100 * share for m, share in score.error.items()}
        for target in entry.targets:
            misses = [m for m, least in target.values.items() if accuracy.get(m, 0.0) < least]
            asked = " and ".join(f"{papers.measures[m]} {v:.2f}" for m, v in target.values.items())
            reached = [m for m in target.values if m in accuracy]
            had = " and ".join(f"{papers.measures[m]} {accuracy[m]:.2f} ± {error[m]:.2f}" for m in reached)
            near = [m for m in reached if abs(accuracy[m] - target.values[m]) < 2 * error[m]]
            verdict = f"missed in {' and '.join(papers.measures[m] for m in misses)}" if misses else "reached"
            if near:
                verdict += f" ({' and '.join(papers.measures[m] for m in near)} within two standard errors)"
            lines.append(f"- {entry.label} (seed {seed}) against {target.name}, {asked}: {had}, {verdict}.")
    return lines
