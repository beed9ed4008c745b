"""`flatrock check`: is a recipe sound, what does it say in full, and what will it cost?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from flatrock.cli.console import TerminalProgress, friendly, human, say
from flatrock.cli.shared import tell_namesake
from flatrock.core.device import named_devices, pick_device
from flatrock.core.errors import ConfigError, DataError
from flatrock.core.guests import is_own
from flatrock.core.numbers import scaled
from flatrock.core.provenance import device_name
from flatrock.core.team import Team
from flatrock.data.catalog import DAMAGED, default_folder, found, info
from flatrock.data.source import SPLITS
from flatrock.recipes.build import build_job, extra_fault
from flatrock.recipes.helper import helper_fault
from flatrock.recipes.load import load_recipe
from flatrock.recipes.notes import notes
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.schema import Recipe
from flatrock.recipes.start import leak_fault, start_fault, start_faults
from flatrock.recipes.text import recipe_text
from flatrock.workflows.cost import Cost, estimate
from flatrock.workflows.together import device_faults

# Passes that take this much longer than the best of them tell of others who use the device.
BUSY = 1.5
# Damaged images that are named.
MOST_SHOWN = 20


def run(
    recipe: Annotated[str, typer.Argument(help="a name of `flatrock ls recipes`, or a YAML file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example train.epochs=3")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="folder with data already there")] = None,
    device: Annotated[
        str, typer.Option(help="where it is to be trained: auto, cpu, cuda; all, or cuda:0,cuda:1: they share batches")
    ] = "auto",
    every_image: Annotated[
        bool, typer.Option("--every-image", help="decode every image of a folder, and name those that cannot be")
    ] = False,
) -> None:
    """Validate a recipe, print it in full, its parameter count, steps and estimated cost."""
    with friendly():
        tell_namesake(recipe)
        chosen = load_recipe(recipe, overrides or [], also=start_faults)
        say(recipe_text(chosen, called=recipe))
        if every_image:
            _look_at_images(chosen, data_dir)
        where = [pick_device(one) for one in named_devices(device)]
        cost = estimate(
            chosen, device=where[0], samples=_counted(chosen, data_dir, devices=len(where)), devices=len(where)
        )
        _line("recipe", f"{chosen.name}, valid, hash {recipe_hash(chosen)}")
        _line("data", _place(chosen, data_dir))
        _tell_cost(cost, chosen.train.batch_size, where)
        for text in notes(chosen, per_epoch=cost.steps_per_epoch):
            _line("note", text)
        known = (extra_fault(chosen), helper_fault(chosen), start_fault(chosen), leak_fault(chosen, data_dir))
        sources = [fault for fault in known if fault]
        if faults := (*device_faults(chosen, where), *sources):
            raise ConfigError(f"recipe {chosen.name} is sound, but cannot be trained yet:", faults)


def _tell_cost(cost: Cost, batch_size: int, where: Sequence[torch.device]) -> None:
    """The numbers, and what of them several devices share."""
    _line("parameters", f"{cost.parameters:,}")
    if len(where) > 1:
        most, least = (Team(rank, len(where)).rows(batch_size) for rank in (0, len(where) - 1))
        part = f"{most}" if most == least else f"{least} or {most}"
        _line("devices", f"{len(where)}, each with {part} of the {batch_size} samples of a batch (docs/speed.md)")
    if cost.steps is None or cost.seconds is None or cost.total_flops is None:
        _line("not checked", "number, size and classes of the images, which training may refuse; give --data-dir")
        return
    _line("steps", f"{cost.steps:,} ({cost.steps_per_epoch:,} per epoch over {cost.samples:,} samples)")
    _line("passes", f"{cost.forwards_per_step} forward passes of the network per step")
    _line("arithmetic", f"about {scaled(cost.total_flops, 'FLOP')}")
    name, beside = device_name(where[0]), ""
    if len(where) > 1:
        name = f"{len(where)} x {name}" if where[0].type == "cuda" else f"{name}, whose cores they share"
        beside = "; what devices send to each other is not counted"
    now = f"; while it is as busy as now, about {human(cost.slowdown * cost.seconds)}" if cost.slowdown >= BUSY else ""
    _line("time", f"about {human(cost.seconds)} on {name}{', idle' if now else ''}{now}")
    mean = ", and from their mean" if now else ""
    say(
        f"  (an estimate, extrapolated from the best of {cost.passes} timed passes of one batch{mean}: an order of "
        f"magnitude{beside})"
    )


def _place(recipe: Recipe, folder: Path | None) -> str:
    """Where the data are."""
    missing = f"not found in {folder or default_folder()}; flatrock doctor {recipe.data.name} says how to get it"
    return found(recipe.data.name, folder) or missing


def _counted(recipe: Recipe, folder: Path | None, *, devices: int) -> int | None:
    """How many samples of one's own images are trained on, where they can be looked at; None if that is known without.

    Everything training needs is made of them, so that what it would refuse is refused here.
    """
    name = recipe.data.name
    if info(name).input_shape is not None:
        return None
    if not is_own(name) and folder is None and found(name) is None:
        return None
    return build_job(recipe, data_folder=folder, team=Team(0, devices)).loader.samples


def _look_at_images(recipe: Recipe, folder: Path | None) -> None:
    """DataError names the images, of all that training and evaluation would read, that are damaged."""
    look = DAMAGED.get(recipe.data.name)
    if look is None:
        raise ConfigError(f"every-image: {recipe.data.name} does not lie in image files; leave it out")
    with TerminalProgress() as progress:
        place = folder or default_folder()
        faults = [fault for split in SPLITS for fault in look(split, place, progress, **recipe.data.options)]
    if faults:
        more = f"\n  and {len(faults) - MOST_SHOWN} more" if len(faults) > MOST_SHOWN else ""
        raise DataError("\n  - ".join([f"{len(faults)} images cannot be read:", *faults[:MOST_SHOWN]]) + more)
    _line("images", "every one can be decoded")


def _line(name: str, text: str) -> None:
    say(f"{name:<12} {text}")
