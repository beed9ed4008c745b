"""`flatrock train`: recipe -> run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import TerminalProgress, errors, friendly, say
from flatrock.core.errors import TrainingError
from flatrock.core.records import Run
from flatrock.recipes.load import load_recipe
from flatrock.recipes.train import train_recipe
from flatrock.reports.figures import learning_curves
from flatrock.reports.table import percent


def run(
    recipe: Annotated[str, typer.Argument(help="a name of `flatrock ls recipes`, or a YAML file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example train.epochs=3")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue an interrupted run")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a run of the same name")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="run folder; default runs/<recipe>")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="folder with data already there")] = None,
    download: Annotated[bool, typer.Option("--download", help="fetch missing data")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
) -> None:
    """Train a recipe; interrupted runs continue with --resume."""
    with friendly("the same command with --resume continues from the last saved state"):
        with TerminalProgress() as progress:
            chosen = load_recipe(recipe, overrides or [])
            try:
                done = train_recipe(
                    chosen,
                    folder=run_dir,
                    data_dir=data_dir,
                    download=download,
                    device=device,
                    resume=resume,
                    overwrite=overwrite,
                    progress=progress,
                )
            except TrainingError as error:
                say(("FAILED: ", "bold red"), str(error), to=errors)
                raise typer.Exit(1) from error
        say("\n".join(_summary(done)))
        say(f"curves {learning_curves({chosen.name: done}, done.folder / 'curves.png')}")
        if (done.best_average or done.best) is not None:
            words = [str(done.folder)] + (["--which", "best"] if _collapsed_average(done) else [])
            words += [] if data_dir is None else ["--data-dir", str(data_dir)]
            say(f"next: flatrock eval {shlex.join(words)}")


def _summary(done: Run) -> list[str]:
    """How the run ended, its best epoch and where it lies."""
    best = done.best
    seconds = sum(r.seconds for r in done.records)
    elapsed = done.records[-1].elapsed if done.records else None
    whole = "" if elapsed is None else f", {elapsed:.1f} s with probes and checkpoints"
    lines = [f"{done.status}: {len(done.records)} epochs, {seconds:.1f} s of training{whole}"]
    if best is None:
        lines.append("no best epoch: every epoch predicted one class (collapsed)")
    else:
        where = f"on {best.selected_on.replace('_', '-')} data"
        where += "  (chosen on the TEST set)" if best.selected_on == "test" else ""
        lines.append(f"best epoch {best.epoch}: clean {percent(best.clean)}, robust {percent(best.robust)} {where}")
    mean = done.best_average
    if mean is not None:
        found = f"clean {percent(mean.average_clean)}, robust {percent(mean.average_robust)}"
        lines.append(f"averaged weights, best epoch {mean.epoch}: {found}; evaluations take these")
    if _collapsed_average(done):
        lines.append("averaged weights: no best epoch, every probe of them predicted one class (collapsed)")
    return [*lines, f"run folder {done.folder}"]


def _collapsed_average(done: Run) -> bool:
    """Whether averaged weights were probed and none of them can be taken."""
    return done.best_average is None and any(record.average_robust is not None for record in done.records)
