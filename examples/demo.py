"""Train five classifiers of handwritten digits, attack them, compare. Two or three minutes on two CPU cores.

Run with `make demo`, or `python examples/demo.py [FOLDER]`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from flatrock.cli.console import TerminalProgress, errors, friendly, say, show
from flatrock.cli.page import side_by_side
from flatrock.core.errors import TrainingError
from flatrock.core.progress import clock
from flatrock.core.records import Result
from flatrock.core.runs import Run
from flatrock.recipes.load import load_recipe
from flatrock.reports.figures import learning_curves
from flatrock.reports.page import write_page
from flatrock.reports.table import comparison
from flatrock.workflows.evaluate import evaluate_run, store_result
from flatrock.workflows.story import stories
from flatrock.workflows.train import train_recipe

RECIPES = ("digits_standard", "digits_at", "digits_trades", "digits_trades_awp", "digits_trades_rat")


def main(folder: Annotated[Path, typer.Argument(help="where the runs are put")] = Path("runs/demo")) -> None:
    """Train five classifiers of handwritten digits, attack them, compare."""
    torch.set_num_threads(1)  # the images are tiny: more threads gain little, and lose much on a busy machine
    begun = time.monotonic()
    runs: dict[str, Run] = {}
    results: dict[str, Result | str] = {}
    with friendly("start the demo again for a comparison"), TerminalProgress() as progress:
        for i, name in enumerate(RECIPES, 1):
            say((f"{i}/{len(RECIPES)} {name}", "bold"), f"  ({clock(time.monotonic() - begun)} so far)")
            say(f"  {load_recipe(name).about.summary}")
            try:
                run = train_recipe(name, folder=folder / name, device="cpu", overwrite=True, progress=progress)
            except TrainingError as error:
                results[name] = str(error)
                say(("  FAILED: ", "bold red"), str(error), to=errors)
                continue
            result = evaluate_run(run, progress=progress)
            store_result(run, result)
            runs[name], results[name] = run, result
            say(f"  {len(run.records)} epochs in {sum(r.seconds for r in run.records):.0f} s, then attacked")
        _report(folder, runs, results)
        say(f"done in {clock(time.monotonic() - begun)}; next: flatrock ls, flatrock train digits_mart")
    if len(runs) < len(RECIPES):
        raise typer.Exit(1)


def _report(folder: Path, runs: dict[str, Run], results: dict[str, Result | str]) -> None:
    """The comparison, what it means and where everything lies."""
    first = next((r for r in results.values() if isinstance(r, Result)), None)
    under = f" on {first.n} test digits, {first.threat['norm']} {first.threat['eps']}" if first else ""
    say()
    show(comparison(results), f"Accuracy in percent{under}")
    say("worst case = share of digits that are right under every attack\n")
    if runs:
        folders = [folder / name for name in runs]
        told, title = stories(folders), "five classifiers of handwritten digits"
        page = write_page(told, folder / "page.html", title=title, differences=side_by_side(folders, told))
        say(f"learning curves   {learning_curves(runs, folder / 'learning_curves.png')}")
        say(f"all on one page   {page}")
    say(f"runs and results  {folder}")


if __name__ == "__main__":
    typer.run(main)
