"""`flatrock export`: run -> plain weights, for use without flatrock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import TerminalProgress, friendly, say
from flatrock.cli.shared import check_out
from flatrock.workflows.export import export_weights


def run(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="a run folder or a .safetensors file")],
    out: Annotated[Path, typer.Option(help="the file to write: weights.pt, weights.pth or weights.safetensors")],
    which: Annotated[str, typer.Option(help="checkpoint of a run folder, as in `flatrock eval`")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file of that name")] = False,
) -> None:
    """Write a run's weights as a plain state_dict, and say how to load it."""
    with friendly("nothing was written"):
        check_out(out)
        done = export_weights(source, out, which=which, overwrite=overwrite, progress=TerminalProgress())
        say(f"wrote {done.file}: {done.tensors} tensors of {done.checkpoint}")
        say(f"load   {done.how}")
        say(f"takes  {done.inputs}")
        if done.marks:
            say(("mind ", "yellow"), f"{', '.join(done.marks)}: the epoch of these weights was chosen on the test set")
