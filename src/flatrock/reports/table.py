"""Results side by side. Accuracies are fractions in records and percent in tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatrock.core.errors import ConfigError
from flatrock.core.records import Result
from flatrock.core.rows import WORST


@dataclass(frozen=True)
class Table:
    """A header and rows of text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown(table: Table) -> str:
    """The table as Markdown writes it."""
    lines = [table.header, ("---",) * len(table.header), *table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def named(name: str, *, collapsed: bool) -> str:
    """A model's name with the word that numbers of one that gives one answer to everything must not go without."""
    return f"{name} COLLAPSED" if collapsed else name


def percent(share: float | None) -> str:
    """0.5123 -> '51.23'; nothing for nothing."""
    return "" if share is None else f"{100 * share:.2f}"


def comparison(results: Mapping[str, Result | str]) -> Table:
    """One row per name: clean, each attack, and the per-sample worst case over the attacks.

    A text instead of a Result says why the run failed; its row says FAILED and holds no number. A `*` marks numbers
    whose checkpoint was selected on the test set; COLLAPSED is a model that gives one answer to everything (E15).
    """
    attacks = list(dict.fromkeys(a for r in results.values() if isinstance(r, Result) for a in r.per_attack))
    rows = []
    for name, result in results.items():
        if isinstance(result, str):
            rows.append((name, "FAILED", *[""] * len(attacks), ""))
            continue
        star = "*" if result.marks else ""
        cells = [result.clean, *(result.per_attack.get(a) for a in attacks), result.robust]
        rows.append(
            (named(name, collapsed=result.collapsed), *(percent(c) + (star if c is not None else "") for c in cells))
        )
    return Table(("model", "clean", *attacks, WORST), tuple(rows))


def per_class(result: Result, names: Sequence[str] = ()) -> Table:
    """One row per class: how many samples it has, then the columns of `comparison`; the last row is of all samples.

    Classes are called by number and name. One that is named but has no sample has no accuracy either.
    """
    parts = result.by_class
    if names and max(parts) >= len(names):
        raise ConfigError(f"there are {len(names)} names for at least {max(parts) + 1} classes; name them all")
    table = comparison({**{str(c): part for c, part in parts.items()}, "all": result})
    *known, whole = (row[1:] for row in table.rows)
    numbers = dict(zip(parts, known, strict=True))
    none = ("",) * len(whole)
    rows = [
        (class_name(c, names), str(parts[c].n if c in parts else 0), *numbers.get(c, none))
        for c in range(len(names) or max(parts) + 1)
    ]
    return Table(("class", "samples", *table.header[1:]), (*rows, ("all", str(result.n), *whole)))


def worst_classes(result: Result) -> list[int]:
    """The class of the lowest worst-case accuracy; several if they share it."""
    robust = {c: part.robust for c, part in result.by_class.items()}
    return [c for c, share in robust.items() if share == min(robust.values())]


def class_name(c: int, names: Sequence[str] = ()) -> str:
    """Number and name of a class: '3 cat'; the number alone where that is its name, or there is none."""
    return str(c) if not names or names[c] == str(c) else f"{c} {names[c]}"


def distances(result: Result) -> Table:
    """One row per attack that measures how far the nearest adversarial point lies.

    The mean is over all samples, wrong ones with 0, without those for which nothing was found; for RayS it is ADBD, the
    average decision boundary distance. Queries are forward passes per sample the attack was tried on.
    """
    rows = []
    for name, mean in result.mean_distance.items():
        cost = result.costs.get(name, {})
        queries = f"{cost['queries'] / cost['samples']:.0f}" if cost.get("samples") and "queries" in cost else ""
        adbd = " (ADBD)" if result.attacks.get(name, {}).get("kind") == "RayS" else ""
        distance = "" if mean is None else f"{mean:.4g}"
        rows.append((name + adbd, distance, str(result.unreached[name]), percent(result.per_attack.get(name)), queries))
    return Table(("attack", "mean distance", "not found", "acc %", "queries"), tuple(rows))
