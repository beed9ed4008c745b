"""`flatrock landscape`: runs -> landscapes of their weights or inputs, as records, a table and figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import TerminalProgress, friendly, say, show
from flatrock.core.device import pick_device
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.numbers import number
from flatrock.core.progress import Progress
from flatrock.diagnostics.surface import Landscape
from flatrock.recipes.checkpoints import checkpoints
from flatrock.recipes.landscape import measure_landscape
from flatrock.recipes.landscape_plan import Plan
from flatrock.reports.landscape import caption, check_alike, draw_curves, flatness_table, paired
from flatrock.reports.landscape_page import draw_page
from flatrock.reports.landscape_surfaces import draw_inputs, draw_surfaces

AGAIN = "the same command with --resume goes on from the last finished point"

Sources = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="run folders, checkpoints, or .json landscapes measured before")
]
Kind = Annotated[str, typer.Option(help="weight-1d, weight-2d or input")]
Which = Annotated[
    str, typer.Option(help="comma-separated: auto, best, last, average-best, epoch-10; kept = every epoch kept")
]
Points = Annotated[int | None, typer.Option(help="of each axis, an odd number; 21, for inputs 41")]
Span = Annotated[str | None, typer.Option(help="the axis reaches from -span to span; 1, for inputs the threat's edge")]
Directions = Annotated[int | None, typer.Option(help="random directions, or pairs of them; 10, for weight-2d 1")]
On = Annotated[str | None, typer.Option(help="train, held_out or test samples; train, for inputs test")]
Images = Annotated[int | None, typer.Option(help="how many samples, equally many of each class; 1000, for inputs 4")]
Ids = Annotated[str | None, typer.Option(help="images of an input landscape by their place in the data, e.g. 3,17")]
AttackName = Annotated[str | None, typer.Option("--attack", help="made anew at every point; pgd-10, or none")]
Radius = Annotated[str, typer.Option(help="how far from the middle the table looks, in filter norms")]
Precision = Annotated[str, typer.Option(help="attacks craft in: auto (half on a GPU), half (bfloat16), full")]
BatchSize = Annotated[int | None, typer.Option(min=1)]
DataDir = Annotated[Path | None, typer.Option(help="folder with data already there")]
Out = Annotated[Path | None, typer.Option(help="figures are OUT.png, OUT.svg and OUT.html; default: beside the run")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with an interrupted measurement; reuse finished ones")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda")]
Seed = Annotated[int, typer.Option(help="seed of directions and of the attack's random numbers")]


def run(
    sources: Sources,
    kind: Kind = "weight-1d",
    which: Which = "auto",
    points: Points = None,
    span: Span = None,
    directions: Directions = None,
    on: On = None,
    images: Images = None,
    ids: Ids = None,
    attack: AttackName = None,
    radius: Radius = "0.5",
    precision: Precision = "auto",
    batch_size: BatchSize = None,
    data_dir: DataDir = None,
    out: Out = None,
    resume: Resume = False,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Look at the loss around trained weights, or around images, of one run or of several at one scale."""
    with friendly(AGAIN):
        plan = Plan(
            kind=kind,
            points=points,
            span=None if span is None else number(span),
            directions=directions,
            on=on,
            images=images,
            ids=None if ids is None else _numbers(ids),
            attack=attack,
            seed=seed,
            batch_size=batch_size,
            precision=precision,
        )
        at = _radius(plan, number(radius))
        with TerminalProgress() as progress:
            records = gather(
                sources, plan, which, data_folder=data_dir, device=device, resume=resume, progress=progress
            )
        check_alike(records)
        tell(records, at)
        for file in draw(records, out or beside(sources, f"landscape-{plan.kind}"), at):
            say(f"drew {file}")


def words(text: str) -> list[str]:
    """The words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"ids are whole numbers with commas between them, got {text!r}") from error


def _radius(plan: Plan, radius: float) -> float:
    """How far the table looks; the grid must reach it."""
    if plan.kind == "weight-1d" and not 0 < radius <= (plan.span or 1.0):
        raise ConfigError(f"radius must lie in (0, {plan.span or 1.0:g}], the span of the grid, got {radius:g}")
    return radius


def gather(
    sources: Sequence[Path],
    plan: Plan,
    which: str,
    *,
    data_folder: Path | None,
    device: str,
    resume: bool,
    progress: Progress,
) -> list[Landscape]:
    """One landscape per checkpoint meant; every source is looked at before the first is measured."""
    names = words(which)
    where = pick_device(device)
    found: list[Landscape | Path] = []
    for source in sources:
        if source.suffix == ".json":
            found.append(_stored(source, plan))
        else:
            found += checkpoints(source, names)
    records = []
    for item in found:
        if isinstance(item, Landscape):
            records.append(item)
            continue
        record, file = measure_landscape(
            item, plan, data_folder=data_folder, device=where, resume=resume, progress=progress
        )
        progress.say(f"wrote {file}")
        records.append(record)
    return records


def _stored(file: Path, plan: Plan) -> Landscape:
    if not file.is_file():
        raise StateError(f"there is no landscape {file}")
    record = Landscape.from_json(file.read_text(), str(file))
    if record.kind != plan.kind:
        raise ConfigError(f"{file} is a {record.kind} landscape; say --kind {record.kind}")
    return record


def tell(records: Sequence[Landscape], at: float) -> None:
    """The table, what directions have in common, and what it all is."""
    show(flatness_table(records, at))
    for line in paired(records, at):
        say(line)
    over = "images" if records[0].kind == "input" else "directions"
    say(f"{caption(records)}; nats, mean ± standard deviation over {over}")


def draw(records: Sequence[Landscape], prefix: Path, at: float) -> list[Path]:
    """The figures: for print, for papers, and for a browser."""
    kind = records[0].kind
    files = [prefix.with_name(f"{prefix.name}.{ending}") for ending in ("png", "svg")]
    for file in files:
        if kind == "weight-1d":
            draw_curves(records, file, at=at)
        elif kind == "weight-2d":
            draw_surfaces(records, file)
        else:
            draw_inputs(records, file)
    return [*files, draw_page(records, prefix.with_name(f"{prefix.name}.html"))]


def beside(sources: Sequence[Path], name: str) -> Path:
    """Where figures go unless told: into the folder of the run, or into the one that holds the runs."""
    folders = {source if source.is_dir() else source.parent for source in sources}
    if len(folders) == 1:
        return folders.pop() / name
    return Path(os.path.commonpath([folder.absolute() for folder in folders])) / name
