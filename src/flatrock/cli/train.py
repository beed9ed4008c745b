"""`flatrock train`: recipe -> run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flatrock.cli.console import TerminalProgress, errors, friendly, say
from flatrock.cli.shared import FAILED, UNFINISHED, seeds_of, tell_namesake
from flatrock.cli.train_seeds import SeveralSeeds
from flatrock.core.device import named_devices
from flatrock.core.errors import ConfigError, TrainingError
from flatrock.core.runs import Run
from flatrock.recipes.load import load_recipe, load_seeds, place_of
from flatrock.recipes.pieces import DEFAULT_RUNS
from flatrock.recipes.restore import eval_command
from flatrock.recipes.schema import Recipe
from flatrock.reports.figures import learning_curves
from flatrock.reports.table import percent
from flatrock.workflows.train import train_recipe


def run(
    recipe: Annotated[str, typer.Argument(help="a name of `flatrock ls recipes`, or a YAML file; a run to --resume")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example train.epochs=3")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue an interrupted run, also by its folder: train runs/x --resume")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a run of the same name")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="run folder; default runs/<recipe>")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="such as 0,1,2 or 0-4: one run each, in <run folder>-seed<N>")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="folder with data already there")] = None,
    download: Annotated[bool, typer.Option("--download", help="fetch missing data")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda; all, or cuda:0,cuda:1: they share batches")] = "auto",
) -> None:
    """Train a recipe; interrupted runs continue with --resume."""
    how: dict[str, Any] = {"data_dir": data_dir, "download": download, "device": named_devices(device)}
    left: dict[int, str] = {}
    with friendly("the same command with --resume continues from the last saved state"):
        tell_namesake(recipe)
        if seeds is None:
            chosen = load_recipe(recipe, overrides or [], resume=resume)
            place = place_of(recipe, run_dir, resume=resume)
            runs = {chosen.seed: _trained(chosen, place, resume=resume, overwrite=overwrite, **how)}
        else:
            wanted = load_seeds(recipe, overrides or [], seeds_of(seeds))
            folders = {seed: _folder(chosen, run_dir) for seed, chosen in wanted.items()}
            several = SeveralSeeds(wanted, folders, resume=resume, overwrite=overwrite)
            several.look()
            runs, left = several.train(_trained, **how)
            several.tell(runs, left)
        for done in runs.values():
            words = [] if data_dir is None else ["--data-dir", str(data_dir)]
            if done is not None and (command := eval_command(done, *words, look=resume)):
                say(f"next: {command}")
        if None in runs.values() or left:
            raise typer.Exit(FAILED if None in runs.values() else UNFINISHED)


def _trained(chosen: Recipe, folder: Path | None, **how: Any) -> Run | None:
    """Train one run and tell how it went; None if it failed."""
    try:
        with TerminalProgress() as progress:
            done = train_recipe(chosen, folder=folder, progress=progress, **how)
    except TrainingError as error:
        say(("FAILED: ", "bold red"), str(error), to=errors)
        return None
    tell_run(chosen.name, done)
    return done


def tell_run(name: str, done: Run) -> None:
    """How a run ended; its curves are drawn."""
    say("\n".join(_summary(done)))
    say(f"curves {learning_curves({name: done}, done.folder / 'curves.png')}")


def _folder(chosen: Recipe, run_dir: Path | None) -> Path:
    base = run_dir or DEFAULT_RUNS / chosen.name
    if base.name in ("", ".."):
        raise ConfigError(
            f"run-dir must end in a name with --seeds, got {str(base)!r}; runs/x has them in runs/x-seed0, ..."
        )
    return base.with_name(f"{base.name}-seed{chosen.seed}")


def _summary(done: Run) -> list[str]:
    """How the run ended, its best epoch and where it lies."""
    best = done.best
    seconds = sum(r.seconds for r in done.records)
    elapsed = done.records[-1].elapsed if done.records else None
    whole = "" if elapsed is None else f", {elapsed:.1f} s with probes and checkpoints"
    epochs = f"{len(done.records)} epoch{'' if len(done.records) == 1 else 's'}"
    lines = [f"{done.status}: {epochs}, {seconds:.1f} s of training{whole}"]
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
    if done.average_collapsed:
        lines.append("averaged weights: no best epoch, every probe of them predicted one class (collapsed)")
    return [*lines, f"run folder {done.folder}"]
