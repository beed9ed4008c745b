"""`flatrock overfit`: runs -> robust accuracy and its gap over training, against the sharpness of kept weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer

from flatrock.cli.console import TerminalProgress, friendly, say, show
from flatrock.cli.landscape import AttackName, BatchSize, Device, Precision, Seed
from flatrock.cli.shared import DataDir, beside, check_out, named, no_run, numeric, one_device, without_others, words
from flatrock.core.files import json_text, write_atomic
from flatrock.core.provenance import birth_certificate
from flatrock.diagnostics.overfit import Study
from flatrock.reports.landscape import STAR
from flatrock.reports.overfit import draw_overfit, overfit_table
from flatrock.workflows.landscape_plan import Plan
from flatrock.workflows.overfit import sharpness_plan, study_runs

SCHEMA = "flatrock.overfit/1"

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders, trained with train.keep.every=N")]
Which = Annotated[str, typer.Option(help="comma-separated: kept = every epoch kept, best, last, epoch-10")]
Radius = Annotated[str, typer.Option(help="sharpness is the rise of the loss this far away, in filter norms")]
Directions = Annotated[int, typer.Option(help="random directions")]
On = Annotated[str | None, typer.Option(help="train, held_out or test samples; train")]
Images = Annotated[int | None, typer.Option(help="how many samples, equally many of each class; 1000")]
Out = Annotated[Path | None, typer.Option(help="OUT.png, OUT.svg and OUT.json; default: beside the runs")]
Fresh = Annotated[bool, typer.Option("--fresh", help="measure again what was measured before")]


def run(
    runs: Runs,
    which: Which = "kept",
    radius: Radius = "0.5",
    directions: Directions = 10,
    on: On = None,
    images: Images = None,
    attack: AttackName = None,
    precision: Precision = "auto",
    batch_size: BatchSize = None,
    data_dir: DataDir = None,
    out: Out = None,
    fresh: Fresh = False,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Draw best and last robust accuracy and the robust generalization gap against sharpness over training."""
    with friendly("the same command goes on from the last finished point"):
        runs = without_others(runs, no_run)
        prefix, names = named(out) or beside(runs, "overfit"), words(which)
        check_out(*_files(prefix))
        where = one_device(device)
        plan = sharpness_plan(
            numeric("radius", radius),
            directions=directions,
            on=on,
            images=images,
            attack=attack,
            seed=seed,
            batch_size=batch_size,
            precision=precision,
        )
        with TerminalProgress() as progress:
            studies = study_runs(
                runs,
                plan,
                which=names,
                data_folder=data_dir,
                device=where,
                resume=not fresh,
                progress=progress,
            )
        show(overfit_table(studies))
        say("robust accuracy in percent; gap, train minus selection data, in points; sharpness in nats")
        if any(study.on_test for study in studies.values()):
            say(STAR)
        for line in _outcome(studies, plan, prefix, where):
            say(line)


def _files(prefix: Path) -> list[Path]:
    return [prefix.with_name(f"{prefix.name}.{ending}") for ending in ("png", "svg", "json")]


def _outcome(studies: Mapping[str, Study], plan: Plan, prefix: Path, device: torch.device) -> list[str]:
    """Draw the figure, write the numbers; what was made."""
    files = _files(prefix)
    for file in files[:2]:
        draw_overfit(studies, file)
    record = {
        "schema": SCHEMA,
        "runs": {name: study.to_dict() for name, study in studies.items()},
        "plan": plan.described(),
        "provenance": birth_certificate(device=device, seed=plan.seed),
    }
    write_atomic(files[2], json_text(record).encode())
    return [*(f"drew {file}" for file in files[:2]), f"wrote {files[2]}"]
