"""TrH's curvature study on two moons: sum and spread of the Hessian's eigenvalues while three networks train.

    python examples/two_moons.py

Trains moons_at without regulariser (the paper's Standard), with the trace of the top layer (Top) and with the trace of
the whole network (Full), measures the Hessian of the adversarial loss on all training points after every epoch, and
draws the paper's figure; then compares the three over five seeds. Writes results/two_moons.json and
docs/figures/two_moons.png. A few minutes on two CPU cores; runs that are there are not trained again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from flatrock.attacks.catalog import ATTACKS
from flatrock.cli.console import TerminalProgress, say
from flatrock.core.files import write_atomic
from flatrock.core.progress import Progress
from flatrock.core.provenance import birth_certificate
from flatrock.core.rng import Seed
from flatrock.diagnostics.curvature import Settings
from flatrock.diagnostics.exact import exact_curvature
from flatrock.diagnostics.hessian import Hessian, by_layer, still
from flatrock.diagnostics.moments import Moments, network_moments
from flatrock.recipes.build import build_threat
from flatrock.recipes.load import load_recipe
from flatrock.recipes.part import data_part
from flatrock.recipes.pieces import build_model
from flatrock.recipes.restore import load
from flatrock.reports.style import COLOURS, LINES, blank, dress, finish
from flatrock.workflows.checkpoints import checkpoints, epoch_of
from flatrock.workflows.curvature import Crafted
from flatrock.workflows.evaluate import evaluate_run
from flatrock.workflows.train import train_recipe

RECIPES = {"no trace": "moons_at", "top layer": "moons_at_trh_top", "whole network": "moons_at_trh_full"}
LAYERS = {"whole": "whole network", "fc1": "layer 1", "fc2": "layer 2", "head": "layer 3 (top)"}
LABELS = {"sum": "sum of eigenvalues (trace)", "std": "standard deviation of eigenvalues"}
# Epochs of the first seed whose Hessian is computed exactly, too, and those the seeds are compared at.
EXACT = (0, 50, 100)
COMPARED = tuple(range(60, 101, 10))

Task = tuple[str, int, Path | None, bool]


def curvature_of(task: Task) -> dict[str, Moments]:
    """Of the adversarial loss on all training points, attacked as in training, at a checkpoint (None = untrained)."""
    name, seed, file, exact = task
    torch.set_num_threads(1)
    recipe = load_recipe(name, {"seed": seed})
    data = data_part(recipe, "train")
    model = (build_model(recipe) if file is None else load(file)).eval()
    x, y = data.images(torch.arange(len(data))), data.y
    attack = ATTACKS.make(recipe.attack.name, **recipe.attack.options)
    x_adv = Crafted(attack, x, y, data.ids, build_threat(recipe), Seed(seed).child("curvature"), len(x))(model)
    parameters = dict(model.named_parameters())
    with still(model, x_adv, y):
        if exact:
            found = exact_curvature(F.cross_entropy(model(x_adv), y), parameters)
            return {"whole": found.whole, **found.layers}
        whole, layers = network_moments(
            lambda members: Hessian(model, x_adv, y, members, batch_size=len(x)),
            by_layer(parameters),
            parameters,
            Settings().draws,
            Seed(seed).child("probes"),
        )
    return {"whole": whole, **layers}


def trained(recipe: str, seed: int, folder: Path, every: int, progress: Progress | None = None) -> dict[int, Path]:
    """Checkpoints of a run by epoch."""
    run = train_recipe(
        recipe,
        folder=folder / f"{recipe}-{seed}",
        device="cpu",
        resume=True,
        progress=progress,
        seed=seed,
        train={"keep": {"every": every}},
        select={"every": 10},
    )
    return {epoch_of(file) or 0: file for file in checkpoints(run, ["kept"])}


def measured(tasks: Sequence[Task], title: str, progress: Progress, jobs: int) -> list[dict[str, Moments]]:
    """The curvatures of many checkpoints, some at the same time."""
    progress.begin(title, len(tasks))
    found = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for moments in pool.map(curvature_of, tasks):
            found.append(moments)
            progress.advance(1)
    progress.end()
    return found


def table(epochs: Sequence[int], found: Sequence[Mapping[str, Moments]]) -> dict[str, Any]:
    """Epochs, and sum and standard deviation of the eigenvalues with their standard errors, for each layer."""
    rows: dict[str, Any] = {"epochs": list(epochs)}
    for layer in LAYERS:
        blocks = [moments[layer] for moments in found]
        rows[layer] = {
            "sum": [b.trace.value for b in blocks],
            "sum_error": [b.trace.error for b in blocks],
            "std": [b.spread.value for b in blocks],
            "std_error": [b.spread.error for b in blocks],
        }
    return rows


def study(name: str, folder: Path, seed: int, progress: Progress, jobs: int) -> dict[str, Any]:
    """Train one variant and measure it after every epoch."""
    recipe = RECIPES[name]
    kept: dict[int, Path | None] = {0: None, **trained(recipe, seed, folder, 1, progress)}
    every = measured([(recipe, seed, file, False) for file in kept.values()], f"curvature, {name}", progress, jobs)
    exact = measured([(recipe, seed, kept[e], True) for e in EXACT], f"exactly, {name}", progress, jobs)
    result = evaluate_run(folder / f"{recipe}-{seed}", which="last", attacks=["pgd-20"])
    accuracy = {"clean": result.clean, "pgd-20": result.robust}
    return {"recipe": recipe, **table(list(kept), every), "exact": table(EXACT, exact), **accuracy}


def over_seeds(folder: Path, seeds: int, progress: Progress, jobs: int) -> dict[str, Any]:
    """Sum and spread of the whole network, mean over some epochs, of every variant and seed."""
    tasks: list[Task] = []
    for recipe in RECIPES.values():
        for seed in range(seeds):
            files = trained(recipe, seed, folder, 1 if seed == 0 else 10, progress)
            tasks += [(recipe, seed, files[epoch], False) for epoch in COMPARED]
    whole = iter([moments["whole"] for moments in measured(tasks, "curvature, all seeds", progress, jobs)])
    found: dict[str, Any] = {"epochs": list(COMPARED)}
    for name in RECIPES:
        runs = [[next(whole) for _ in COMPARED] for _ in range(seeds)]
        found[name] = {
            "sum": [statistics.mean(m.trace.value for m in run) for run in runs],
            "std": [statistics.mean(m.spread.value for m in run) for run in runs],
        }
    return found


def draw(runs: Mapping[str, Mapping[str, Any]], path: Path, text: str) -> None:
    """Sum above, spread below; the whole network and its three layers side by side; crosses are exact."""
    figure = blank(13, 6)
    axes = figure.subplots(2, len(LAYERS), sharex=True)
    for column, (layer, title) in enumerate(LAYERS.items()):
        for row, (what, label) in enumerate(LABELS.items()):
            panel = axes[row, column]
            for colour, line, (name, run) in zip(COLOURS, LINES, runs.items(), strict=False):
                values, errors = run[layer][what], run[layer][f"{what}_error"]
                reach = [(v - 2 * e, v + 2 * e) for v, e in zip(values, errors, strict=True)]
                panel.plot(run["epochs"], values, color=colour, linestyle=line, linewidth=1.2, label=name)
                panel.fill_between(run["epochs"], *zip(*reach, strict=True), color=colour, alpha=0.25, linewidth=0)
                panel.plot(EXACT, run["exact"][layer][what], "x", color=colour, markersize=7, markeredgewidth=1.6)
            dress(panel, title if row == 0 else "", "epoch" if row else "", label if column == 0 else "")
            panel.set_yscale("log")
    panel = axes[0, -1]
    panel.plot([], [], "x", color="0.3", label="exact")
    panel.legend(frameon=False, fontsize=8, title="trace in the loss of", title_fontsize=8)
    finish(figure, text, path)


def tell(runs: Mapping[str, Mapping[str, Any]], seeds: Mapping[str, Any]) -> None:
    """The figures of the document."""
    for name, run in runs.items():
        last = ", ".join(f"{run['exact'][k]['sum'][-1]:.3g} / {run['exact'][k]['std'][-1]:.3g}" for k in LAYERS)
        say(f"{name:<14} clean {100 * run['clean']:.1f}  pgd-20 {100 * run['pgd-20']:.1f}  sum / std at the end {last}")
        off = [
            abs(run[k][what][run["epochs"].index(e)] / run["exact"][k][what][i] - 1)
            for k in LAYERS
            for what in LABELS
            for i, e in enumerate(EXACT)
        ]
        say(f"{'':<14} estimates off the exact values by {100 * max(off):.1f} % at most")
    for what in LABELS:
        base = seeds["no trace"][what]
        for name in RECIPES:
            values = seeds[name][what]
            ratio = [v / b for v, b in zip(values, base, strict=True)]
            told = f"{statistics.mean(values):.3g} ± {statistics.stdev(values):.2g}, of 'no trace' {ratio[0]:.3f}"
            say(f"{what} over seeds, {name:<14} {told} " + " ".join(f"{r:.3f}" for r in ratio[1:]))


def main() -> None:
    """Train, measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/two_moons"))
    parser.add_argument("--seeds", type=int, default=5, help="2 or more; the figure is of the first, 0")
    parser.add_argument("--jobs", type=int, default=2, help="checkpoints measured at the same time")
    parser.add_argument("--out", type=Path, default=Path("results/two_moons.json"))
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/two_moons.png"))
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds must be 2 or more, got {options.seeds}: one seed has no spread")
    torch.set_num_threads(1)
    begun = time.monotonic()
    certificate = birth_certificate(device="cpu", seed=0, command=" ".join(sys.argv), jobs=options.jobs)
    with TerminalProgress() as progress:
        runs = {name: study(name, options.runs, 0, progress, options.jobs) for name in RECIPES}
        seeds = over_seeds(options.runs, options.seeds, progress, options.jobs)
    certificate["seconds"] = round(time.monotonic() - begun)
    tell(runs, seeds)
    content = {"runs": runs, "seeds": seeds, "provenance": certificate}
    write_atomic(options.out, (json.dumps(content, indent=1) + "\n").encode())
    draw(
        runs,
        options.figure,
        "Hessian of the adversarial cross-entropy (PGD-1, Linf 0.02 of the plane, inputs held fixed) of all 1000 "
        f"training points of two moons, seed 0; lines: Hutch++ with {Settings().probes} probes, bands of two standard "
        "errors; crosses: exact",
    )


if __name__ == "__main__":
    main()
