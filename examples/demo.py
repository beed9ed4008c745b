"""Train three classifiers of handwritten digits, attack them, compare. A few minutes on two CPU cores.

Run with `make demo`, or `python examples/demo.py [FOLDER]`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from flatrock.cli.console import TerminalProgress, console, show
from flatrock.core.records import Result, Run
from flatrock.recipes.restore import evaluate_run
from flatrock.recipes.train import train_recipe
from flatrock.reports.figures import learning_curves
from flatrock.reports.table import comparison

RECIPES = ("digits_standard", "digits_at", "digits_trades")


def main(folder: Path) -> None:
    """Train, evaluate, print, draw."""
    begun = time.monotonic()
    progress = TerminalProgress()
    runs: dict[str, Run] = {}
    results: dict[str, Result | str] = {}
    for i, name in enumerate(RECIPES, 1):
        console.print(f"[bold]{i}/{len(RECIPES)} {name}[/]", highlight=False)
        runs[name] = train_recipe(name, folder=folder / name, device="cpu", overwrite=True, progress=progress)
        results[name] = evaluate_run(runs[name], progress=progress)
        seconds = sum(r.seconds for r in runs[name].records)
        console.print(f"    {len(runs[name].records)} epochs in {seconds:.0f} s", highlight=False)
    curves = learning_curves(runs, folder / "learning_curves.png")
    first = next(r for r in results.values() if isinstance(r, Result))
    console.print()
    show(
        comparison(results),
        f"Accuracy in percent on {first.n} test digits, {first.threat['norm']} {first.threat['eps']}",
    )
    console.print("worst case = share of digits that are right under every attack\n", highlight=False)
    for what, where in (
        ("learning curves", curves),
        ("runs", folder),
        ("results", folder / "<recipe>/result-best.json"),
    ):
        console.print(f"{what:<16} {where}", highlight=False, soft_wrap=True)
    console.print(
        f"done in {time.monotonic() - begun:.0f} s; next: flatrock ls, flatrock train digits_mart", highlight=False
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/demo"))
