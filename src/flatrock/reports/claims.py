"""What became of the papers' claims: differences measured here, paired by test sample, beside theirs, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from flatrock.evaluation.rows import Gap, Row, mean_gap, paired
from flatrock.reports.papers import Entry, Figure, Papers, Protocol


@dataclass(frozen=True)
class Verdict:
    """One claim in one measure: the paper's difference in points and ours."""

    measure: str
    theirs: float
    ours: Gap
    doubtful: bool  # the paper's difference is less than twice its own standard error

    @property
    def word(self) -> str:
        """Reproduced if ours has the same sign and is beyond chance, contradicted if it has the other."""
        if not self.ours.beyond_chance:
            return "not reproduced, no difference beyond chance"
        return "reproduced" if (self.ours.mean > 0) == (self.theirs > 0) else "contradicted"

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


def gain(one: Mapping[int, Row], other: Mapping[int, Row], measure: str) -> Gap | None:
    """How much better one recipe is than another, the mean over the seeds both were trained with."""
    gaps = []
    for seed in sorted(one.keys() & other.keys()):
        a, b = (runs[seed].scores[runs[seed].main or ""].right for runs in (one, other))
        if measure in a and measure in b:
            gaps.append(paired(a[measure], b[measure]))
    return mean_gap(gaps) if gaps else None


def drop(runs: Mapping[int, Row], measure: str) -> Gap | None:
    """How much a recipe loses from its best epoch to its last, the mean over its seeds."""
    gaps = []
    for row in runs.values():
        last = (row.main or "").replace("best", "last")
        if last in row.scores and measure in row.scores[last].right:
            gaps.append(paired(row.scores[last].right[measure], row.scores[row.main or ""].right[measure]))
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


def claim_lines(protocol: Protocol, rows: Sequence[Row], papers: Papers) -> list[str]:
    """A sentence for every claim about a row that was measured together with its base."""
    known = by_recipe(rows)
    lines = []
    for name, entry in protocol.rows.items():
        if entry.over is not None and name in known and entry.over in known:
            ours = {m: gain(known[name], known[entry.over], m) for m in papers.measures}
            base = protocol.rows[entry.over].label
            lines += _sentences(f"{entry.label} minus {base}", entry.claims, ours, papers)
        if name in known:
            lost = {m: drop(known[name], m) for m in papers.measures}
            turned = tuple((last, best) for best, last in entry.drops)
            lines += _sentences(f"{entry.label}, last epoch minus best", turned, lost, papers)
    return lines


def _sentences(
    what: str, pairs: Sequence[tuple[Figure, Figure]], ours: Mapping[str, Gap | None], papers: Papers
) -> list[str]:
    lines = []
    for pair in pairs:
        if found := verdicts(pair, ours):
            said = "; ".join(v.text(papers.measures[v.measure]) for v in found)
            other = pair[1].where
            where = pair[0].where if other == pair[0].where else f"{pair[0].where}; without: {other}"
            lines.append(f"- {what} ({where}): {said}.")
    return lines


def target_lines(name: str, entry: Entry, rows: Sequence[Row], papers: Papers) -> list[str]:
    """Whether a row reached what it should."""
    lines = []
    for seed, row in sorted(by_recipe(rows).get(name, {}).items()):
        accuracy = row.scores[row.main or ""].accuracy
        for target in entry.targets:
            misses = [m for m, least in target.values.items() if 100 * accuracy.get(m, 0.0) < least]
            asked = " and ".join(f"{papers.measures[m]} {v:.2f}" for m, v in target.values.items())
            had = " and ".join(f"{papers.measures[m]} {100 * accuracy[m]:.2f}" for m in target.values if m in accuracy)
            verdict = f"missed in {' and '.join(papers.measures[m] for m in misses)}" if misses else "reached"
            lines.append(f"- {entry.label} (seed {seed}) against {target.name}, {asked}: {had}, {verdict}.")
    return lines
