"""Evaluations of several checkpoints of a run: a line each, and the best under every measure, as some papers report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flatrock.core.records import Result
from flatrock.core.rows import DISTANCE, WORST, measure_name
from flatrock.reports.papers import Measure
from flatrock.reports.table import Table, named

BEST = "best of each"
# Results of one checkpoint and where each is not as the first, the recipe's own evaluation.
Found = Sequence[tuple[str, Result]]


def checkpoint_table(found: Mapping[str, Found]) -> Table:
    """A line per checkpoint and, last, the highest number under every measure over them; clean is that of the
    checkpoint `chosen_by` names. Those are chosen on the test set, and marked. What collapsed is never the best."""
    values = {name: _values(results) for name, results in found.items()}
    columns = ["clean", *_attacks(values), WORST]
    lines = []
    for name, results in found.items():
        own, star = results[0][1], "*" if results[0][1].marks else ""
        lines.append((named(name, collapsed=own.collapsed), *(_cell(c, values[name].get(c), star) for c in columns)))
    sound = [values[name] for name in _sound(found)]
    best = {c: max((one[c] for one in sound if c in one), default=None) for c in columns}
    best["clean"] = values[chosen_by(found)[0]]["clean"]
    lines.append((f"{BEST}*", *(_cell(c, best[c], "*") for c in columns)))
    return Table(("checkpoint", *columns), tuple(lines))


def chosen_by(found: Mapping[str, Found]) -> tuple[str, str]:
    """The checkpoint whose clean accuracy stands for the best, and the measure it is the best under: PGD-20 if that was
    asked, else another PGD, else the first attack."""
    values = {name: _values(found[name]) for name in _sound(found)}
    attacks = [name for name in _attacks(values) if all(name in one for one in values.values())]
    measure = next((a for start in ("pgd-20", "pgd", "") for a in attacks if a.startswith(start)), WORST)
    return max(values, key=lambda name: values[name][measure]), measure


def _sound(found: Mapping[str, Found]) -> list[str]:
    """The checkpoints whose numbers say something: not those that give one answer to everything, unless all do."""
    return [name for name, results in found.items() if not results[0][1].collapsed] or list(found)


def _values(results: Found) -> dict[str, float]:
    """What one checkpoint has: percent, and mean distances as they are."""
    own = results[0][1]
    found = {"clean": 100 * own.clean, WORST: 100 * own.robust}
    for where, result in results:
        found |= {measure_name(name, where): 100 * share for name, share in result.per_attack.items()}
        far = {name: mean for name, mean in result.mean_distance.items() if mean is not None}
        found |= {measure_name(f"{DISTANCE}{name}", where): mean for name, mean in far.items()}
    return found


def _attacks(values: Mapping[str, Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for found in values.values() for name in found if name not in ("clean", WORST)))


def _cell(column: str, value: float | None, star: str) -> str:
    return "" if value is None else Measure(name=column, attacks=(column,)).written(value) + star
