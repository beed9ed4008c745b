"""Robust overfitting on 200 digits: three schedules and AWP, the gap against the sharpness of the weights.

    python examples/robust_overfitting.py --figure docs/figures/overfit_digits.png --out results/overfit_digits.json

Trains AT with a piecewise, a cosine and a cyclic schedule, and AT-AWP with the piecewise one, 60 epochs each; every
fifth epoch is kept and its landscape measured. About five minutes on one CPU core. What is there is not trained or
measured again. The same for runs of your own: flatrock train RECIPE train.keep.every=5, then flatrock overfit RUN...
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from flatrock.cli.console import TerminalProgress, say, show
from flatrock.core.files import json_text, write_atomic
from flatrock.core.progress import Progress
from flatrock.core.provenance import birth_certificate
from flatrock.reports.overfit import draw_overfit, overfit_table
from flatrock.workflows.overfit import sharpness_plan, study_runs
from flatrock.workflows.train import train_recipe

EPOCHS, EVERY, SAMPLES = 60, 5, 200
PIECEWISE = {"name": "piecewise", "milestones": [30, 45]}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "piecewise": ("digits_at", PIECEWISE),
    "cosine": ("digits_at", {"name": "cosine"}),
    "cyclic": ("digits_at", {"name": "cyclic"}),
    "piecewise_awp": ("digits_at_awp", PIECEWISE),
}


def trained(name: str, folder: Path, seed: int, progress: Progress) -> Path:
    """The folder of a run, trained or gone on with where that is needed."""
    recipe, schedule = RUNS[name]
    done = train_recipe(
        recipe,
        folder=folder / name,
        device="cpu",
        resume=True,
        progress=progress,
        seed=seed,
        data={"limit": SAMPLES},
        train={"epochs": EPOCHS, "batch_size": 32, "keep": {"every": EVERY}},
        schedule=schedule,
    )
    return done.folder


def main() -> None:
    """Train, measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/robust_overfitting"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path, default=Path("runs/robust_overfitting/overfit.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TerminalProgress() as progress:
        folders = [trained(name, options.runs, options.seed, progress) for name in RUNS]
        studies = study_runs(folders, sharpness_plan(0.5), progress=progress)
    show(overfit_table(studies))
    say(f"drew {draw_overfit(studies, options.figure)}")
    if options.out:
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        about = birth_certificate(device="cpu", seed=options.seed, command=command)
        content = {"runs": {name: study.to_dict() for name, study in studies.items()}, "provenance": about}
        write_atomic(options.out, (json_text(content) + "\n").encode())


if __name__ == "__main__":
    main()
