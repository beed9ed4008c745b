"""Flatness methods side by side on the 8x8 digits: five seeds, clean and PGD-20 accuracy, mean and spread.

    python examples/digits_table.py --out results/digits_flatness.json --page docs/flatness_digits.md

Trains every recipe with seeds 0 to 4 and evaluates the checkpoint chosen on held-out data (the averaged one where the
recipe averages) on the 500 test digits. About a quarter of an hour on one CPU core. Runs that are there are not
trained again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from flatrock.cli.console import TerminalProgress, say
from flatrock.core.files import write_atomic
from flatrock.core.provenance import birth_certificate
from flatrock.engine.folder import RunFolder
from flatrock.recipes.load import load_recipe
from flatrock.workflows.evaluate import evaluate_run
from flatrock.workflows.train import train_recipe

RECIPES = {
    "TRADES": "digits_trades",
    "TRADES + AWP": "digits_trades_awp",
    "TRADES + RAT": "digits_trades_rat",
    "TRADES + TrH": "digits_trades_trh",
    "TRADES + AWP + RAT + SWA": "digits_trades_awp_rat_swa",
}
ATTACKS = ("pgd-20",)


def one(recipe: str, seed: int, folder: Path, progress: TerminalProgress) -> dict[str, Any]:
    """Train (or find) one run; accuracies in percent, seconds of training."""
    run = train_recipe(
        recipe, folder=folder / f"{recipe}-{seed}", device="cpu", resume=True, progress=progress, seed=seed
    )
    result = evaluate_run(run, attacks=ATTACKS, progress=progress)
    chosen = run.best_average or run.best
    assert chosen is not None
    return {
        "seed": seed,
        "clean": 100 * result.clean,
        "pgd-20": 100 * result.robust,
        "epoch": chosen.epoch,
        "checkpoint": result.provenance["checkpoint"],
        "seconds": sum(r.seconds for r in run.records),
        "recipe_hash": result.provenance["recipe_hash"],
        "trained": RunFolder(run.folder).read_info()["provenance"],
    }


def spread(rows: list[dict[str, Any]], key: str) -> str:
    """Mean and standard deviation over the seeds."""
    values = [row[key] for row in rows]
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def page(found: dict[str, list[dict[str, Any]]], certificate: dict[str, Any]) -> str:
    """The table as a document of its own."""
    lines = [
        "# Measured on digits",
        "",
        f"Written by `python {certificate['command']}`; every run is in `results/digits_flatness.json`.",
        "",
        f"8x8 digits, Linf 0.2, {len(next(iter(found.values())))} seeds, 500 test digits, percent, mean ± standard "
        f"deviation over seeds. Trained at commit {', '.join(certificate['trained_at'])}, "
        f"torch {certificate['torch']}, {certificate['device']}, "
        f"{certificate['time'][:10]}.",
        "",
        "| method | recipe | flatness | clean | PGD-20 | training |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in found.items():
        recipe = load_recipe(RECIPES[name])
        options = "; ".join(f"{f.name} {json.dumps(f.options)[1:-1]}" for f in recipe.flatness).replace('"', "")
        seconds = statistics.mean(row["seconds"] for row in rows)
        lines.append(
            f"| {name} | `{recipe.name}` | {options} | {spread(rows, 'clean')} | {spread(rows, 'pgd-20')} | "
            f"{seconds:.0f} s |"
        )
    base = found["TRADES"]
    lines += ["", "Difference to TRADES with the same seed (PGD-20 points, mean ± standard deviation):", ""]
    for name, rows in list(found.items())[1:]:
        pairs = [{"gain": a["pgd-20"] - b["pgd-20"]} for a, b in zip(rows, base, strict=True)]
        better = sum(p["gain"] > 0 for p in pairs)
        lines.append(f"- {name}: {spread(pairs, 'gain')}; better with {better} of {len(pairs)} seeds")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, evaluate, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/digits_table"))
    parser.add_argument("--seeds", type=int, default=5, help="2 or more")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds must be 2 or more, got {options.seeds}: one seed has no spread")
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {}
    with TerminalProgress() as progress:
        for name, recipe in RECIPES.items():
            found[name] = [one(recipe, seed, options.runs, progress) for seed in range(options.seeds)]
            say(f"{name:<26} clean {spread(found[name], 'clean')}  pgd-20 {spread(found[name], 'pgd-20')}")
    seeds = list(range(options.seeds))
    commits = sorted({row["trained"]["commit"] for rows in found.values() for row in rows})
    certificate = birth_certificate(device="cpu", seed=0, seeds=seeds, command=" ".join(sys.argv), trained_at=commits)
    if options.out:
        write_atomic(options.out, (json.dumps({"runs": found, "provenance": certificate}, indent=1) + "\n").encode())
    if options.page:
        write_atomic(options.page, page(found, certificate).encode())


if __name__ == "__main__":
    main()
