"""`flatrock pseudo-label`: run and images -> labelled images to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import TerminalProgress, friendly, say
from flatrock.cli.shared import check_out, one_device
from flatrock.workflows.pseudo_label import pseudo_label


def run(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="a run folder or a .safetensors file")],
    images: Annotated[Path, typer.Option(help=".npz file with `image` uint8 [M, H, W, C]; `label` left out or -1")],
    out: Annotated[Path, typer.Option(help=".npz file to write, for data.extra.file of a recipe")],
    which: Annotated[str, typer.Option(help="checkpoint of a run folder, as in `flatrock eval`")] = "auto",
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file of that name")] = False,
) -> None:
    """Label images with a trained model, to train another on them (robust self-training)."""
    with friendly("nothing was written"):
        check_out(out)
        with TerminalProgress() as progress:
            done = pseudo_label(
                source,
                images,
                out,
                which=which,
                batch_size=batch_size,
                device=one_device(device),
                overwrite=overwrite,
                progress=progress,
            )
        say(f"wrote {done.file}: {done}")
