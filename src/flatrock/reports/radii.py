"""Evaluations of one model under several radii: accuracy over eps, as a table and as curves."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from pathlib import Path

from flatrock.core.errors import StateError
from flatrock.core.records import Result
from flatrock.core.rows import WORST
from flatrock.reports.style import blank, dress, finish, legend, line_style, mark_of
from flatrock.reports.table import Table, comparison


def evaluated_radii(results: Mapping[str, Result]) -> Table:
    """One row per radius, as it is written: clean, each attack, worst case."""
    table = comparison(results)
    return Table(("eps", *table.header[1:]), table.rows)


def draw_radii(results: Mapping[str, Result], path: Path, *, name: str) -> Path:
    """Accuracy under each attack, and the worst case, over eps, with standard errors sqrt(p (1 - p) / n).

    At 0 stands the clean accuracy. StateError where norms or samples differ: that is no curve.
    """
    found = sorted(results.values(), key=lambda result: float(result.threat["eps"]))
    asked = {(r.threat["norm"], r.n, r.provenance.get("samples_digest")) for r in found}
    if len(found) < 2 or len(asked) > 1:
        raise StateError(f"a curve over eps needs two results or more in one norm on the same samples, got {asked}")
    figure = blank(7.2, 4.6)
    axes = figure.subplots()
    attacks = list(dict.fromkeys(attack for result in found for attack in result.per_attack))
    for i, label in enumerate([*(attacks if len(attacks) > 1 else []), WORST]):
        shares = {float(r.threat["eps"]): r.robust if label == WORST else r.per_attack.get(label) for r in found}
        points = {0.0: found[0].clean} | {eps: share for eps, share in shares.items() if share is not None}
        errors = [100 * sqrt(p * (1 - p) / found[0].n) for p in points.values()]
        percent = [100 * p for p in points.values()]
        shown = f"{WORST} ({attacks[0]})" if len(attacks) == 1 else label
        style = line_style(i)
        axes.errorbar(
            list(points),
            percent,
            errors,
            label=shown,
            marker=mark_of(i),
            markersize=4,
            linewidth=1.4,
            **style,
        )
    norm = found[0].threat["norm"]
    dress(axes, f"{name}: accuracy over the radius", f"{norm} eps, pixel units of [0, 1]", "percent of all samples")
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)
    legend(axes)
    about = found[0].provenance
    facts = [about.get("data", f"{found[0].n} samples"), f"seed {about['seed']}" if "seed" in about else ""]
    facts += ["at 0: clean", "bars: standard errors of a test set of this size"]
    facts += ["checkpoint selected on the test set"] if found[0].marks else []
    return finish(figure, "; ".join(str(fact) for fact in facts if fact), path)
