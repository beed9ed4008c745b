"""Files of `flatrock bench` made up without measuring: recipes of the library with the times asked for."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

from results_cases import CERTIFICATE

from flatrock.attacks.catalog import ATTACKS
from flatrock.core.costs import Bench, StepCost
from flatrock.recipes.build import build_flatness
from flatrock.recipes.load import load_recipe

ENGINE = CERTIFICATE["engine"]
# Rounds of one machine that drifts: 1 is the median, 0.9 and 1.1 are the ends of its interval.
DRIFT = (0.9, 0.95, 0.97, 1.0, 1.02, 1.05, 1.1)


def fake_cost(
    recipe: str, ms: float, *, gib: float | None = 2.0, rounds: tuple[float, ...] = DRIFT, **changes: Any
) -> StepCost:
    """A library recipe whose step takes `ms`, times `rounds` in every round."""
    keys = {key: changes.pop(key) for key in list(changes) if key not in StepCost.__dataclass_fields__}
    asked = load_recipe(recipe, {key.replace("__", "."): value for key, value in keys.items()})
    attack = None if asked.attack.name == "none" else ATTACKS.make(asked.attack.name, **asked.attack.options)
    methods: dict[str, Any] = build_flatness(asked)  # type: ignore[assignment]
    told: dict[str, Any] = {
        "recipe": recipe,
        "model": asked.model.name,
        "batch_size": asked.train.batch_size,
        "steps_per_epoch": 383,
        "objective": asked.objective.name,
        "flatness": tuple(
            {"name": n, **{f.name: getattr(m, f.name) for f in fields(m) if f.init}} for n, m in methods.items()
        ),
        "attack": {
            "name": asked.attack.name,
            "steps": getattr(attack, "steps", None),
            "bn_mode": asked.attack.bn_mode,
        },
        "ms_per_step": ms * median(rounds),
        "images_per_second": 128_000 / ms,
        "seconds_per_epoch": 0.383 * ms,
        "tflops": 123.4,
        "share_of_ceiling": 0.1763,
        "memory_gib": gib,
        "attack_ms": 0.8 * ms,
        "kernels_ms": {"convolutions": 0.6 * ms, "copies": 0.1 * ms},
        "ratio": 1.0,
        "interval": None,
        "rounds_ms": tuple(ms * r for r in rounds),
        "recipe_hash": "0123456789abcdef",
        "engine": ENGINE,
    }
    return StepCost(**{**told, **changes})


def fake_bench(*costs: StepCost, **about: Any) -> Bench:
    """These costs in one file."""
    return Bench(costs, 700.0, {**CERTIFICATE, "rounds": 7, "steps": 10, **about})


def store(path: Path, bench: Bench) -> Path:
    """Write it as the command does."""
    path.write_text(json.dumps(bench.to_dict()))
    return path
