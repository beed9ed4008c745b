"""What each flatness method costs: the time of a training step over that of its objective alone.

    python benchmarks/flatness_overhead.py --out benchmarks/flatness_overhead.json

One process trains all contestants in turn, step by step on the same batches and in an order that rotates, so that
whatever else the machine does falls on all of them alike. A ratio is the median over the rounds of a method's time over
its base's time in the same round; beside it stands a 95 % interval of the median. PGD-10 and one thread, on the small
network of the digits recipes. The dear ones are measured in fewer rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flatrock.core.files import write_atomic
from flatrock.core.provenance import birth_certificate
from flatrock.engine.job import Job
from flatrock.engine.step import train_step
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe

METHODS: dict[str, dict[str, Any]] = {
    "rat": {"flatness": [{"name": "rat"}]},
    "rat without noise": {"flatness": [{"name": "rat", "sigma": 0}]},
    "trh": {"flatness": [{"name": "trh", "weight": 1e-4, "gamma": 1e-4}]},
    "s2o": {"flatness": ["s2o"]},
    "swa": {"flatness": ["swa"]},
    "awp": {"flatness": ["awp"]},
    "sam": {"flatness": ["sam"]},
    "awp+rat+swa": {"flatness": ["awp", "rat", "swa"]},
    "rat exact": {"flatness": [{"name": "rat", "terms": "exact"}]},
    "entropy_sgd": {"optimizer": {"name": "entropy_sgd"}},
    "atent": {"attack": {"name": "langevin", "steps": 10}},
}
CHEAP = ["rat", "rat without noise", "trh", "s2o", "swa", "awp", "sam", "awp+rat+swa"]
DEAR = ["rat exact", "entropy_sgd", "atent"]
# AT makes no clean pass; RAT and S2O add it.
CONTESTS = {
    "trades": ("trades", CHEAP),
    "at": ("at", ["rat", "trh", "s2o", "swa", "awp"]),
    "trades, dear ones": ("trades", DEAR),
    "at, dear ones": ("at", ["atent"]),
}


def job(objective: str, batch_size: int, folder: Path, keys: dict[str, Any]) -> Job:
    """A digits job with PGD-10 whose model is in train mode."""
    overrides = {"attack": {"steps": 10}, "train.batch_size": batch_size, **keys}
    made = build_job(load_recipe(f"digits_{objective}", overrides), folder=folder)
    made.model.train()
    return made


def seconds(of: Job, batch: Any, step: int) -> float:
    """Time of one training step."""
    begun = time.perf_counter()
    train_step(of, batch, step=step, guard=False)
    return time.perf_counter() - begun


def measure(objective: str, methods: list[str], *, batch_size: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Median step time of the base, and every method's ratio to it."""
    base = job(objective, batch_size, folder, {})
    contestants = {"base": base} | {m: job(objective, batch_size, folder, METHODS[m]) for m in methods}
    batches = cycle([b for b in base.loader.epoch(0) if len(b.ids) == batch_size])
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for step in range(rounds + 3):
        batch = next(batches)
        for name in names[step % len(names) :] + names[: step % len(names)]:
            taken = seconds(contestants[name], batch, step)
            if step >= 3:  # the first rounds only warm up
                times[name].append(taken)
    rows = {}
    for name in methods:
        ratios = sorted(t / b for t, b in zip(times[name], times["base"], strict=True))
        # The number of ratios below the median is binomial: these order statistics hold it with 95 %.
        reach = 0.98 * math.sqrt(rounds)
        low, high = ratios[max(int(rounds / 2 - reach), 0)], ratios[min(int(rounds / 2 + reach), rounds - 1)]
        middle = statistics.median(ratios)
        rows[name] = {"ratio": round(middle, 3), "interval": [round(low, 3), round(high, 3)]}
    return {"base_ms": round(1000 * statistics.median(times["base"]), 2), "rounds": rounds, "methods": rows}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        found = {}
        for name, (base, methods) in CONTESTS.items():
            rounds = options.rounds // 8 if "dear" in name else options.rounds
            found[name] = measure(base, methods, batch_size=options.batch_size, rounds=rounds, folder=Path(folder))
    for base, result in found.items():
        print(f"{base}: {result['base_ms']} ms a step")
        for name, row in result["methods"].items():
            print(f"  {name:<18} x {row['ratio']:.3f}  ({row['interval'][0]:.3f} to {row['interval'][1]:.3f})")
    if options.out:
        certificate = birth_certificate(device="cpu", seed=0, batch_size=options.batch_size, command=" ".join(sys.argv))
        write_atomic(options.out, (json.dumps({**found, "provenance": certificate}, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
