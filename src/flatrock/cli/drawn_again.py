"""Records that are only drawn again: options that ask for a measurement would be ignored, so they are refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import typer

from flatrock.core.errors import ConfigError

# These change nothing that is seen, so that a command can be repeated with them.
HARMLESS = ("sources", "out", "device", "resume")


def check_drawn_again(
    ctx: typer.Context, sources: Sequence[Path], *, measures: bool, heeded: Collection[str] = ()
) -> None:
    """ConfigError if sources are records alone, but more than the options `heeded` is asked of them.

    `measures`: something else is measured beside them, and the options are for that.
    """
    if measures or not sources or any(source.suffix != ".json" for source in sources):
        return
    asked = []
    for option in ctx.command.params:
        name = option.name or ""
        told = ctx.get_parameter_source(name)
        if told is not None and told.name == "COMMANDLINE" and name not in (*HARMLESS, *heeded):
            value = ctx.params[name]
            asked.append(option.secondary_opts[0] if value is False else f"{option.opts[0]} {value}")
    if asked:
        raise ConfigError(
            f"{', '.join(asked)}: records are drawn as they were measured, and no option changes that; leave it out, "
            "or name a run to be measured"
        )
