"""`flatrock eval`: run -> result."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import TerminalProgress, friendly, say, show
from flatrock.core.device import pick_device
from flatrock.recipes.evaluate import evaluate_run, store_result
from flatrock.reports.table import comparison


def run(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="a run folder or a .safetensors file")],
    attacks: Annotated[
        str | None, typer.Option(help="comma-separated, e.g. autoattack or fgsm,pgd-20,cw-20:restarts=5")
    ] = None,
    which: Annotated[
        str, typer.Option(help="best, last, average-best, average-last; auto = best, averaged if kept")
    ] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="only so many test samples")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1)] = None,
    data_dir: Annotated[Path | None, typer.Option(help="folder with data already there")] = None,
    precision: Annotated[str, typer.Option(help="attacks craft in: auto (half on a GPU), half, full")] = "auto",
    doubt: Annotated[bool, typer.Option(help="look for reasons not to believe the number")] = True,
    keep_adversarial: Annotated[bool, typer.Option(help="store the adversarial inputs too")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an interrupted evaluation")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    seed: Annotated[int, typer.Option(help="seed of the attacks' random numbers")] = 0,
) -> None:
    """Evaluate a trained model on its test set under attack."""
    with friendly("the same command with --resume goes on from the last finished batch"):
        with TerminalProgress() as progress:
            result = evaluate_run(
                source,
                which=which,
                attacks=None if attacks is None else [a.strip() for a in attacks.split(",") if a.strip()],
                limit=limit,
                batch_size=batch_size,
                precision=precision,
                doubt=doubt,
                keep_adversarial=keep_adversarial,
                journal=True,
                resume=resume,
                data_folder=data_dir,
                device=pick_device(device),
                seed=seed,
                progress=progress,
            )
        show(comparison({str(result.provenance["recipe"]): result}))
        say(
            f"{result.provenance['data']}; {result.threat['norm']} eps {result.threat['eps']:.4g}; percent; "
            "worst case = per sample over all attacks named"
        )
        for finding in result.findings:
            say(("finding ", "yellow"), str(finding))
        say(f"wrote {store_result(source, result)}")
