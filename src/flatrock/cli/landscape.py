"""`flatrock landscape`: runs, or a model of your own, -> landscapes of weights or inputs: records, table, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from flatrock.cli.console import TerminalProgress, friendly, say, show
from flatrock.cli.drawn_again import check_drawn_again
from flatrock.cli.foreign import Data, Eps, Model, Norm, Normalize, NumClasses, Weights, any_given, check_sources
from flatrock.cli.shared import DataDir, beside, check_out, named, numeric, words
from flatrock.core.device import named_devices
from flatrock.core.errors import ConfigError
from flatrock.core.progress import Progress, Silent
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.surface import Landscape, nearest_radius, on_grid
from flatrock.reports.landscape import caption, check_alike, draw_curves, flatness_table, paired
from flatrock.reports.landscape_page import draw_page
from flatrock.reports.landscape_surfaces import draw_inputs, draw_surfaces
from flatrock.workflows.checkpoints import checkpoints
from flatrock.workflows.foreign_model import ForeignModel
from flatrock.workflows.landscape import measure_landscape
from flatrock.workflows.landscape_alike import check_comparable
from flatrock.workflows.landscape_plan import Plan

AGAIN = "the same command with --resume goes on from the last finished point"

# What is drawn: a landscape that was read, or what one is measured of.
Found = Landscape | Path | ForeignModel
# How far the table looks unless told, in filter norms.
RADIUS = 0.5

Sources = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN...", help="run folders, checkpoints, or .json landscapes measured before"),
]
Kind = Annotated[str, typer.Option(help="weight-1d, weight-2d or input")]
Which = Annotated[
    str,
    typer.Option(help="comma-separated: auto, best, last, epoch-10; kept = every epoch kept; the entry of --weights"),
]
Points = Annotated[int | None, typer.Option(help="of each axis, an odd number; 21, for inputs 41")]
Span = Annotated[str | None, typer.Option(help="the axis reaches from -span to span; 1, for inputs the threat's edge")]
Directions = Annotated[int | None, typer.Option(help="random directions, or pairs of them; 10, for weight-2d 1")]
On = Annotated[str | None, typer.Option(help="train, held_out or test samples; train, for inputs test")]
Images = Annotated[int | None, typer.Option(help="how many samples, equally many of each class; 1000, for inputs 4")]
Ids = Annotated[str | None, typer.Option(help="images of an input landscape by their place in the data, e.g. 3,17")]
AttackName = Annotated[str | None, typer.Option("--attack", help="made anew at every point; pgd-10, or none")]
Radius = Annotated[
    str | None,
    typer.Option(help="a point of the axis: how far from the middle the table looks, in filter norms; nearest to 0.5"),
]
Precision = Annotated[str, typer.Option(help="attacks craft in: auto (half on a GPU), half (bfloat16), full")]
BatchSize = Annotated[int | None, typer.Option(min=1)]
Out = Annotated[
    Path | None, typer.Option(help="figures are OUT.png, OUT.svg and OUT.html; default: by the run, or here")
]
Resume = Annotated[bool, typer.Option("--resume", help="go on with an interrupted measurement; reuse finished ones")]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda; all, or cuda:0,cuda:1: they share the points of a weight landscape")
]
Seed = Annotated[int, typer.Option(help="seed of directions and of the attack's random numbers")]


def run(
    ctx: typer.Context,
    sources: Sources = None,
    kind: Kind = "weight-1d",
    which: Which = "auto",
    points: Points = None,
    span: Span = None,
    directions: Directions = None,
    on: On = None,
    images: Images = None,
    ids: Ids = None,
    attack: AttackName = None,
    radius: Radius = None,
    precision: Precision = "auto",
    batch_size: BatchSize = None,
    data_dir: DataDir = None,
    out: Out = None,
    resume: Resume = False,
    device: Device = "auto",
    seed: Seed = 0,
    model: Model = None,
    weights: Weights = None,
    data: Data = None,
    num_classes: NumClasses = None,
    normalize: Normalize = None,
    norm: Norm = None,
    eps: Eps = None,
) -> None:
    """Look at the loss around trained weights, or around images, of one run or of several at one scale.

    Or of one model of your own (--model, --weights).
    """
    own: dict[str, Any] = {"model": model, "weights": weights, "data": data, "num_classes": num_classes}
    own |= {"normalize": normalize, "norm": norm, "eps": eps}
    asked: dict[str, Any] = {"kind": kind, "points": points, "directions": directions, "on": on, "images": images}
    asked |= {"attack": attack, "seed": seed, "batch_size": batch_size, "precision": precision}
    with friendly(AGAIN):
        check_sources(sources or [], own, "measure")
        check_drawn_again(ctx, sources or [], measures=any_given(own), heeded=("kind", "radius"))
        far = None if span is None else numeric("span", span)
        plan = Plan(**asked, span=far, ids=None if ids is None else _numbers(ids))
        prefix = named(out) or beside([Path()] if any_given(own) else sources or [], f"landscape-{plan.kind}")
        check_out(*_files(prefix))
        where = plan.devices(named_devices(device))
        foreign = ForeignModel(**own, which=which) if any_given(own) else None
        found = look(sources or [], plan, words(which), foreign=foreign, data_folder=data_dir, device=where[0])
        at = _radius(plan, found, None if radius is None else numeric("radius", radius))
        how: dict[str, Any] = {"folder": prefix.parent, "data_folder": data_dir, "device": where, "resume": resume}
        with TerminalProgress() as progress:
            records = measured(found, plan, how, progress)
        tell(records, at)
        for file in draw(records, prefix, at):
            say(f"drew {file}")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ConfigError(f"ids are whole numbers with commas between them, got {text!r}") from error


def _radius(plan: Plan, found: Sequence[Found], radius: float | None) -> float:
    """How far table and figure look: RADIUS, or what is asked for; of that every grid must have a point.

    Where a grid has none at RADIUS the table takes the nearest, and says so.
    """
    own = Axis(points=plan.points or 0, span=plan.span or 1.0).values
    axis = min((item.axis if isinstance(item, Landscape) else own for item in found), key=lambda axis: axis[-1])
    reach = axis[-1]
    if radius is None:
        return min(RADIUS, reach)
    if plan.kind != "weight-1d":
        return radius
    if not (0 < radius <= reach or on_grid(axis, radius)):
        raise ConfigError(f"radius must lie in (0, {reach:g}], the span of the grid, got {radius:g}")
    if not on_grid(axis, radius):
        raise ConfigError(
            f"radius {radius:g} is no point of the grid, {len(axis)} points to {reach:g}; the nearest is "
            f"{nearest_radius(axis, radius):g}, or choose other --points"
        )
    return nearest_radius(axis, radius)


def look(
    sources: Sequence[Path],
    plan: Plan,
    which: Sequence[str],
    *,
    foreign: ForeignModel | None,
    data_folder: Path | None,
    device: torch.device | str,
) -> list[Found]:
    """The landscapes read and what is to be measured; ConfigError if they could not be drawn together."""
    found: list[Found] = []
    for source in sources:
        if source.suffix == ".json":
            found.append(_stored(source, plan))
        else:
            found += checkpoints(source, which)
    found += [] if foreign is None else [foreign]
    stored = [item for item in found if isinstance(item, Landscape)]
    if stored:
        check_alike(stored)
    fresh = [item for item in found if not isinstance(item, Landscape)]
    # What is odd of a recipe is said as it is measured.
    check_comparable(fresh, plan, stored=stored, data_folder=data_folder, device=device, progress=Silent())
    return found


def measured(found: Sequence[Found], plan: Plan, how: Mapping[str, Any], progress: Progress) -> list[Landscape]:
    """One landscape each."""
    records = []
    for item in found:
        if isinstance(item, Landscape):
            records.append(item)
            continue
        records.append(measure_landscape(item, plan, **how, progress=progress)[0])
    return records


def _stored(file: Path, plan: Plan) -> Landscape:
    record = Landscape.from_file(file)
    if record.kind != plan.kind:
        raise ConfigError(f"{file} holds a landscape of another kind; say --kind {record.kind}")
    return record


def tell(records: Sequence[Landscape], at: float) -> None:
    """The table, what directions have in common, and what it all is."""
    show(flatness_table(records, at))
    for line in paired(records, at):
        say(line)
    over = "images" if records[0].kind == "input" else "directions"
    say(f"{caption(records)}; nats, mean ± standard deviation over {over}")


def _files(prefix: Path) -> list[Path]:
    return [prefix.with_name(f"{prefix.name}.{ending}") for ending in ("png", "svg", "html")]


def draw(records: Sequence[Landscape], prefix: Path, at: float) -> list[Path]:
    """The figures: for print, for papers, and for a browser."""
    kind = records[0].kind
    *files, page = _files(prefix)
    for file in files:
        if kind == "weight-1d":
            draw_curves(records, file, at=at)
        elif kind == "weight-2d":
            draw_surfaces(records, file)
        else:
            draw_inputs(records, file)
    return [*files, draw_page(records, page)]
