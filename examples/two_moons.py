"""TrH's curvature study on two moons: eigenvalue sum and spread of the Hessian while three networks train.

    python examples/two_moons.py --out results/two_moons.json --figure docs/figures/two_moons.png

Trains moons_at without regulariser, with the trace of the top layer, and with the trace of the whole network, then
computes the Hessian of the adversarial loss on all training points exactly at every tenth epoch. About ten minutes on
one CPU core.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.attacks.craft import craft
from flatrock.attacks.gradient import GradientAttack
from flatrock.cli.console import TerminalProgress, say
from flatrock.core.files import write_atomic
from flatrock.core.progress import Progress
from flatrock.core.provenance import birth_certificate
from flatrock.core.records import Run
from flatrock.core.rng import Seed
from flatrock.data.catalog import load_data
from flatrock.data.split import held_out_split
from flatrock.flatness.full_trace import Spectrum, exact_traces, spectrum_sums
from flatrock.recipes.build import build_model, build_threat
from flatrock.recipes.evaluate import evaluate_run
from flatrock.recipes.load import load_recipe
from flatrock.recipes.restore import load
from flatrock.recipes.train import train_recipe
from flatrock.reports.figures import COLOURS

RECIPES = {"no trace": "moons_at", "top layer": "moons_at_trh_top", "whole network": "moons_at_trh_full"}
LAYERS = {"whole": "whole network", "fc1": "layer 1", "fc2": "layer 2", "head": "layer 3 (top)"}
EVERY, EPOCHS = 10, 100


def loss_at(name: str, seed: int, file: Path | None) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A checkpoint's network (or the untrained one), all training points attacked as in training, logits and loss."""
    recipe = load_recipe(name, {"seed": seed})
    data = held_out_split(load_data("moons", "train", **recipe.data.options), size=recipe.data.held_out).train
    x, y = data.images(torch.arange(len(data))), data.y
    model = (build_model(recipe) if file is None else load(file)).eval()
    gen = Seed(seed).child("curvature").samples(torch.arange(len(x)))
    x_adv = craft(GradientAttack(**recipe.attack.options), model, x, y, build_threat(recipe), gen)
    logits = model(x_adv)
    return model, x_adv, logits, F.cross_entropy(logits, y)


def spectra(task: tuple[str, int, Path | None]) -> dict[str, Spectrum]:
    """Of the adversarial loss at a checkpoint: the whole network and each layer."""
    torch.set_num_threads(1)
    model, _, _, loss = loss_at(*task)
    whole, layers = spectrum_sums(loss, dict(model.named_parameters()))
    return {"whole": whole, **layers}


def trained(name: str, seed: int, folder: Path, progress: Progress | None = None) -> tuple[Run, dict[int, Path]]:
    """A run and the checkpoints it kept, by epoch."""
    run = train_recipe(
        name,
        folder=folder / f"{name}-{seed}",
        device="cpu",
        overwrite=True,
        progress=progress,
        seed=seed,
        train={"keep": {"every": EVERY}},
        select={"every": EVERY},
    )
    return run, {int(re.findall(r"\d+", f.stem)[0]): f for f in sorted(run.folder.glob("epoch-*.safetensors"))}


def traces(task: tuple[str, int, Path]) -> list[float]:
    """Train one variant with one seed; the trace of the whole network at the epochs of the second half."""
    torch.set_num_threads(1)
    name, seed, folder = task
    found = []
    for epoch, file in trained(name, seed, folder)[1].items():
        if epoch > EPOCHS // 2:
            model, x_adv, logits, loss = loss_at(name, seed, file)
            found.append(sum(float(t.detach()) for t in exact_traces(model, loss, [(x_adv, logits)]).values()))
    return found


def study(name: str, folder: Path, seed: int, progress: TerminalProgress, jobs: int) -> dict[str, Any]:
    """Train one variant and measure it along the way."""
    recipe = RECIPES[name]
    run, files = trained(recipe, seed, folder, progress)
    kept: dict[int, Path | None] = {0: None, **files}
    found: dict[str, Any] = {"recipe": recipe, "epochs": list(kept)}
    progress.begin(f"curvature, {name}", len(kept))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for measured in pool.map(spectra, [(recipe, seed, file) for file in kept.values()]):
            for layer, spectrum in measured.items():
                row = found.setdefault(layer, {"sum": [], "std": []})
                row["sum"].append(spectrum.sum)
                row["std"].append(spectrum.std)
            progress.advance(1)
    progress.end()
    result = evaluate_run(run, which="last", attacks=["pgd-20"])
    return {**found, "clean": result.clean, "pgd-20": result.robust}


def over_seeds(folder: Path, seeds: int, progress: TerminalProgress, jobs: int) -> dict[str, Any]:
    """Mean trace over the second half of training, of every variant and seed."""
    tasks = [(recipe, seed, folder) for recipe in RECIPES.values() for seed in range(seeds)]
    progress.begin("all seeds", len(tasks))
    found: dict[str, list[float]] = {name: [] for name in RECIPES}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for (recipe, _, _), values in zip(tasks, pool.map(traces, tasks), strict=True):
            name = next(n for n, r in RECIPES.items() if r == recipe)
            found[name].append(statistics.mean(values))
            progress.advance(1)
    progress.end()
    return {"epochs": f"mean of epochs {EPOCHS // 2 + EVERY} to {EPOCHS}", "whole trace": found}


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Sum above, spread below; the whole network and its three layers side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(LAYERS), sharex=True)
    for column, (layer, title) in enumerate(LAYERS.items()):
        for row, what in enumerate(("sum", "std")):
            panel = axes[row, column]
            for colour, mark, (name, run) in zip(COLOURS, "osD", runs.items(), strict=False):
                panel.plot(run["epochs"], run[layer][what], color=colour, marker=mark, markersize=3, label=name)
            panel.set_yscale("log")
            panel.grid(alpha=0.25, linewidth=0.5)
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(labelsize=8)
        axes[0, column].set_title(title, fontsize=10, loc="left")
        axes[1, column].set_xlabel("epoch", fontsize=9)
    axes[0, 0].set_ylabel("sum of eigenvalues (trace)", fontsize=9)
    axes[1, 0].set_ylabel("standard deviation of eigenvalues", fontsize=9)
    axes[0, -1].legend(frameon=False, fontsize=9, title="trace in the loss of", title_fontsize=9)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=130)
    write_atomic(path, content.getvalue())


def main() -> None:
    """Train, measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/two_moons"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5, help="how many for the comparison of traces")
    parser.add_argument("--jobs", type=int, default=2, help="checkpoints measured at the same time")
    parser.add_argument("--measured", type=Path, help="go on from a study measured before")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    certificate = birth_certificate(device="cpu", seed=options.seed, command=" ".join(sys.argv))
    seeds: dict[str, Any] = {}
    if options.measured:
        measured = json.loads(options.measured.read_text())
        runs, seeds = measured["runs"], measured.get("seeds", {})
        certificate["spectra"] = measured["provenance"]
    with TerminalProgress() as progress:
        if not options.measured:
            runs = {name: study(name, options.runs, options.seed, progress, options.jobs) for name in RECIPES}
        if not seeds:
            seeds = over_seeds(options.runs / "seeds", options.seeds, progress, options.jobs)
    for name, run in runs.items():
        last = {layer: f"{run[layer]['sum'][-1]:.3g} / {run[layer]['std'][-1]:.3g}" for layer in LAYERS}
        say(f"{name:<14} clean {100 * run['clean']:.1f}  pgd-20 {100 * run['pgd-20']:.1f}  sum / std at the end {last}")
    for name, values in seeds.get("whole trace", {}).items():
        say(f"{name:<14} trace, {seeds['epochs']}: {statistics.mean(values):.3g} ± {statistics.stdev(values):.2g}")
    if options.out:
        content = {"runs": runs, "seeds": seeds, "provenance": certificate}
        write_atomic(options.out, (json.dumps(content, indent=1) + "\n").encode())
    if options.figure:
        draw(runs, options.figure)


if __name__ == "__main__":
    main()
