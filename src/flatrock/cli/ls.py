"""`flatrock ls`: what there is, one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from flatrock.attacks.catalog import ATTACKS
from flatrock.cli.console import friendly, say
from flatrock.cli.reproduce_table import table_summaries
from flatrock.core.errors import ConfigError
from flatrock.core.registry import Registry, unknown
from flatrock.data.catalog import DATA
from flatrock.engine.schedule import SCHEDULES
from flatrock.evaluation.plans import PLANS, TRANSFER
from flatrock.flatness.catalog import FLATNESS
from flatrock.models.catalog import MODELS
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.optimizers.catalog import OPTIMIZERS
from flatrock.recipes.load import summaries


def _rows(registry: Registry[Any]) -> list[tuple[str, str]]:
    return [(e.name, f"{e.summary} ({e.cite})" if e.cite else e.summary) for e in registry]


def _attacks() -> list[tuple[str, str]]:
    return [
        *_rows(ATTACKS),
        (
            f"{TRANSFER}*",
            f"any of these crafted on another run (eval --surrogate, evaluate.more in recipes), as {TRANSFER}pgd-20",
        ),
    ]


def _plans() -> list[tuple[str, str]]:
    return [(name, summary) for name, (_, summary) in PLANS.items()]


KINDS: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "recipes": lambda: list(summaries().items()),
    "tables": lambda: list(table_summaries().items()),
    "models": lambda: [*_rows(MODELS), ("FILE:function", "a network of your own, see docs/own_network.md")],
    "data": lambda: [*_rows(DATA), ("FILE:function", "data of your own that a function makes, see docs/data.md")],
    "attacks": _attacks,
    "plans": _plans,
    "objectives": lambda: _rows(OBJECTIVES),
    "flatness": lambda: _rows(FLATNESS),
    "optimizers": lambda: _rows(OPTIMIZERS),
    "schedules": lambda: _rows(SCHEDULES),
}


def run(
    kind: Annotated[str, typer.Argument(help=f"{', '.join(KINDS)}; all if left out")] = "",
) -> None:
    """List what there is: recipes, published tables, models, data sets, attacks, objectives, flatness methods, ..."""
    with friendly():
        if kind and kind not in KINDS:
            raise ConfigError(unknown("kind", kind, KINDS))
        for name, rows in KINDS.items():
            if kind in ("", name):
                say((name, "bold"))
                found = rows()
                width = max(len(row) for row, _ in found)
                for row, summary in found:
                    say(f"  {row:<{width}}  {summary}")
