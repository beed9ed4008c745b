"""What several seeds say together: runs of one recipe, or evaluations of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev

import torch

from flatrock.core.records import Result
from flatrock.core.runs import Run
from flatrock.reports.table import Table, comparison, percent


def trained_seeds(runs: Mapping[int, Run | None]) -> Table:
    """One row per seed: the epoch evaluations take, its accuracies when it was chosen; None is a run that failed.

    Those of averaged weights say so, and have no mean with those of plain ones.
    """
    rows: list[tuple[str, ...]] = []
    kinds: set[bool] = set()
    clean: list[float | None] = []
    robust: list[float | None] = []
    for seed, run in runs.items():
        best = None if run is None else run.best_average or run.best
        if run is None or best is None:
            rows.append((str(seed), "FAILED" if run is None else "collapsed", "", ""))
            continue
        averaged = run.best_average is not None
        kinds.add(averaged)
        clean.append(best.average_clean if averaged else best.clean)
        robust.append(best.average_robust if averaged else best.robust)
        epoch = f"{best.epoch}{', averaged' if averaged else ''}"
        rows.append((str(seed), epoch, percent(clean[-1]), percent(robust[-1])))
    if len(kinds) > 1:
        rows.append(("no mean: some are averaged", "", "", ""))
    elif len(clean) > 1:
        rows.append((f"mean ± s.d. of {len(clean)}", "", spread(clean), spread(robust)))
    return Table(("seed", "best epoch", "clean", "robust"), tuple(rows))


def evaluated_seeds(results: Mapping[int, Result]) -> Table:
    """One row per seed of the attacks, mean and standard deviation, and the per-sample worst case over all seeds.

    Of one seed there is nothing but its row.
    """
    first = next(iter(results.values()))
    flags = {name: torch.stack([r.flags[name] for r in results.values()]).all(0) for name in first.flags}
    table = comparison({**{str(s): r for s, r in results.items()}, "all seeds": replace(first, flags=flags)})
    attacks = [[r.per_attack[name] for r in results.values()] for name in first.per_attack]
    columns = [[r.clean for r in results.values()], *attacks, [r.robust for r in results.values()]]
    if len(results) == 1:
        return Table(("seed", *table.header[1:]), table.rows[:1])
    means = ("mean ± s.d.", *map(spread, columns))
    return Table(("seed", *table.header[1:]), (*table.rows[:-1], means, table.rows[-1]))


def spread(shares: Sequence[float | None]) -> str:
    """Mean and standard deviation over seeds in percent, of one seed its share; nothing where some are not known."""
    known = [100 * share for share in shares if share is not None]
    if not known or len(known) < len(shares):
        return ""
    return f"{mean(known):.2f} ± {stdev(known):.2f}" if len(known) > 1 else f"{known[0]:.2f}"
