"""The `flatrock` command."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from flatrock.cli import (
    bands,
    bench,
    certify,
    check,
    compare,
    cp,
    curvature,
    doctor,
    evaluate,
    export,
    landscape,
    ls,
    overfit,
    page,
    pseudo_label,
    report,
    report_speed,
    reproduce,
    results,
    status,
    sweep,
    train,
)
from flatrock.cli.console import friendly, say
from flatrock.core.errors import ConfigError
from flatrock.core.provenance import VERSION

app = typer.Typer(
    help="Train image classifiers that stay right under attack, and measure it honestly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    epilog="Start with:  flatrock ls   then   flatrock train digits_at   then   flatrock eval runs/digits_at",
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"flatrock {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """What comes before a command."""
    with friendly():
        _check_launcher()


def _check_launcher() -> None:
    """ConfigError if torchrun, or a launcher like it, began several of us: each would do all of the work."""
    told, size = os.environ, os.environ.get("WORLD_SIZE", "")
    launched = "TORCHELASTIC_RUN_ID" in told or ("RANK" in told and "LOCAL_RANK" in told)
    if launched and size.isdecimal() and int(size) > 1:
        raise ConfigError(
            f"torchrun began this as process {told.get('RANK', '?')} of {size} (RANK, WORLD_SIZE), each of which would "
            "do all of the work; begin flatrock once, without torchrun: with --device all it begins a process on every "
            "GPU itself (unset WORLD_SIZE if this is meant to be the only one)"
        )


app.command("ls")(ls.run)
app.command("cp")(cp.run)
app.command("check")(check.run)
app.command("train")(train.run)
app.command("eval")(evaluate.run)
app.command("compare")(compare.run)
app.command("certify")(certify.run)
app.command("landscape")(landscape.run)
app.command("overfit")(overfit.run)
app.command("curvature")(curvature.run)
app.command("bench")(bench.run)
app.command("pseudo-label")(pseudo_label.run)
app.command("export")(export.run)
app.command("reproduce")(reproduce.run)
app.command("sweep")(sweep.run)
app.command("status")(status.run)
app.command("page")(page.run)
app.command("results")(results.run)
app.command("report")(report.run)
app.command("bands")(bands.run)
app.command("report-speed")(report_speed.run)
app.command("doctor")(doctor.run)


def main() -> None:
    """Entry point of the `flatrock` script and of `python -m flatrock`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a letter the terminal lacks is no reason to lose an hour's work
    app(prog_name="flatrock")
