"""`flatrock check`: is a recipe sound, what does it say in full, and what will it cost?"""

from __future__ import annotations

from typing import Annotated

import typer

from flatrock.cli.console import friendly, say
from flatrock.core.device import pick_device
from flatrock.core.errors import ConfigError
from flatrock.core.provenance import device_name
from flatrock.recipes.cost import estimate
from flatrock.recipes.helper import helper_fault
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.text import recipe_text


def run(
    recipe: Annotated[str, typer.Argument(help="a name of `flatrock ls recipes`, or a YAML file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example train.epochs=3")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda: where the cost is estimated")] = "auto",
) -> None:
    """Validate a recipe, print it in full, its parameter count, steps and estimated cost."""
    with friendly():
        found = load_recipe(recipe, overrides or [])
        say(recipe_text(found))
        where = pick_device(device)
        cost = estimate(found, device=where)
        _line("recipe", f"{found.name}, valid, hash {recipe_hash(found)}")
        _line("parameters", f"{cost.parameters:,}")
        if cost.steps is None or cost.seconds is None or cost.total_flops is None:
            _line("steps", "known once the data are there (the folder decides how many samples there are)")
        else:
            _line("steps", f"{cost.steps:,} ({cost.steps_per_epoch:,} per epoch over {cost.samples:,} samples)")
            _line("passes", f"{cost.forwards_per_step} forward passes of the network per step")
            _line("arithmetic", f"about {cost.total_flops / 1e15:.3g} PFLOP")
            _line("time", f"about {_human(cost.seconds)} on {device_name(where)}")
            say("  (time extrapolated from one batch: an order of magnitude)")
        if fault := helper_fault(found):
            raise ConfigError(f"recipe {found.name} is sound, but cannot be trained yet:", (fault,))


def _line(name: str, text: str) -> None:
    say(f"{name:<12} {text}")


def _human(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 1):.0f} s"
