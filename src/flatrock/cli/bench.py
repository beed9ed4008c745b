"""`flatrock bench`: what a training step costs here, recipes side by side."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import TerminalProgress, friendly, say
from flatrock.cli.shared import check_json, one_device
from flatrock.core.costs import SCHEMA, Bench
from flatrock.core.files import write_atomic
from flatrock.recipes.load import load_recipe
from flatrock.workflows.bench import bench


def run(
    recipes: Annotated[list[str], typer.Argument(help="names or YAML files; the first is what others are compared to")],
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key=value for every recipe, for example train.batch_size=256")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="times every recipe is measured")] = 15,
    steps: Annotated[int, typer.Option(min=1, help="training steps per measurement")] = 10,
    data_dir: Annotated[Path | None, typer.Option(help="folder with data already there")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time whole training steps, data and augmentation included, of recipes in turn in one process."""
    with friendly("nothing was written" if out is None else f"{out} is there only if times had been measured"):
        if out is not None:
            check_json(out, SCHEMA, "file of `flatrock bench`")
        chosen = [load_recipe(name, override or []) for name in recipes]
        with TerminalProgress() as progress:
            found = bench(
                chosen,
                rounds=rounds,
                steps=steps,
                data_folder=data_dir,
                device=one_device(device),
                progress=progress,
                keep=None if out is None else partial(_write, out),
            )
        say("\n".join(_table(found)))
        if out is not None:
            _write(out, found)
            say(f"wrote {out}")


def _write(out: Path, found: Bench) -> None:
    write_atomic(out, (json.dumps(found.to_dict(), indent=1) + "\n").encode())


def _table(found: Bench) -> list[str]:
    """One line per recipe; what stands in the way of speed below."""
    width = max(len(c.recipe) for c in found.costs)
    lines = [
        f"{'recipe':<{width}}  ms/step  images/s   s/epoch  TFLOP/s  of ceiling  memory   x first (95 %)",
    ]
    for c in found.costs:
        memory = "      -" if c.memory_gib is None else f"{c.memory_gib:4.1f} GiB"
        lines.append(
            f"{c.recipe:<{width}}  {c.ms_per_step:7.2f}  {c.images_per_second:8.0f}  {c.seconds_per_epoch:8.2f}  "
            f"{c.tflops:7.3g}  {100 * c.share_of_ceiling:8.1f} %  {memory}  "
            f"{c.ratio:5.3f}{f' ({c.interval[0]:.3f} to {c.interval[1]:.3f})' if c.interval else ''}"
        )
    engines = {f"{c.engine['precision']}{', compiled' if c.engine['compile'] else ''}" for c in found.costs}
    lines.append(
        f"{found.provenance['device']}, torch {found.provenance['torch']}, {' and '.join(sorted(engines))}; "
        f"matmul ceiling {found.ceiling:.3g} TFLOP/s"
    )
    for c in found.costs:
        if c.kernels_ms:
            spent = ", ".join(f"{kind} {ms:.2f}" for kind, ms in c.kernels_ms.items())
            crafting = "" if c.attack_ms is None else f"; the attack alone takes {c.attack_ms:.2f}"
            launching = "" if c.launch_ms is None else f"; the processor launches it in {c.launch_ms:.2f}"
            lines.append(f"{c.recipe}, ms of a step: {spent}{crafting}{launching}")
    return [*lines, *(f"{c.recipe}: {finding}" for c in found.costs for finding in c.findings)]
