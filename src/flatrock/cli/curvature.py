"""`flatrock curvature`: runs -> the curvature of their losses, as records, tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import TerminalProgress, friendly, say, show
from flatrock.cli.shared import beside, check_out, named, words
from flatrock.core.device import pick_device
from flatrock.core.errors import StateError
from flatrock.core.numbers import number
from flatrock.diagnostics.curvature import Settings
from flatrock.diagnostics.curvature_record import CurvatureRecord
from flatrock.recipes.checkpoints import checkpoints
from flatrock.recipes.curvature import Sampling, measure_curvature, planned_curvature
from flatrock.reports.curvature import (
    bound_table,
    caption,
    check_alike,
    curvature_table,
    draw_layers,
    draw_spectra,
    sharpness_table,
)

AGAIN = "the same command with --resume goes on from the last finished part"

Sources = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="run folders, checkpoints, or .json records measured before")
]
Which = Annotated[
    str, typer.Option(help="comma-separated: auto, best, last, average-best, epoch-10; kept = every epoch kept")
]
On = Annotated[str, typer.Option(help="train, held_out or test samples")]
Images = Annotated[int, typer.Option(help="how many samples, equally many of each class")]
AttackName = Annotated[
    str | None, typer.Option("--attack", help="of the adversarial loss, e.g. pgd-20; the recipe's select.attack")
]
Trace = Annotated[str, typer.Option(help="auto (exact for small networks), exact, hutch++, hutchinson")]
Probes = Annotated[int, typer.Option(help="random vectors; hutch++ makes three products for each")]
Layers = Annotated[bool, typer.Option(help="each layer's sum and spread, too")]
Runs = Annotated[int, typer.Option(help="of Lanczos' method, averaged to the density")]
Steps = Annotated[int, typer.Option(help="of each run")]
Top = Annotated[int, typer.Option(help="eigenvalues at each end")]
Gamma = Annotated[str, typer.Option(help="relative size of AWP's weight perturbation")]
AwpSteps = Annotated[int, typer.Option(help="of its ascent; 1 is what AWP trains against")]
Rho = Annotated[str, typer.Option(help="length of SAM's step")]
Sigma0 = Annotated[str, typer.Option(help="deviation of the prior of PAC-Bayes")]
Beta = Annotated[str | None, typer.Option(help="its temperature; the number of training samples")]
Precision = Annotated[str, typer.Option(help="single or double")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="samples at a time; halved where memory is short")]
DataDir = Annotated[Path | None, typer.Option(help="folder with data already there")]
Out = Annotated[Path | None, typer.Option(help="figures are OUT-spectrum.png and OUT-layers.png; default: by the run")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with an interrupted measurement; reuse finished ones")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda")]
Seed = Annotated[int, typer.Option(help="seed of random vectors and of the attack's random numbers")]


def run(
    sources: Sources,
    which: Which = "auto",
    on: On = "train",
    images: Images = 500,
    attack: AttackName = None,
    trace: Trace = "auto",
    probes: Probes = 8,
    layers: Layers = True,
    runs: Runs = 2,
    steps: Steps = 30,
    top: Top = 5,
    gamma: Gamma = "0.005",
    awp_steps: AwpSteps = 10,
    rho: Rho = "0.05",
    sigma0: Sigma0 = "0.1",
    beta: Beta = None,
    precision: Precision = "single",
    batch_size: BatchSize = None,
    data_dir: DataDir = None,
    out: Out = None,
    resume: Resume = False,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Measure the curvature of the clean and the adversarial loss at trained weights: Hessian, sharpness, PAC-Bayes."""
    with friendly(AGAIN):
        sampling = Sampling(on=on, images=images, attack=attack, precision=precision, batch_size=batch_size, seed=seed)
        settings = Settings(
            trace=trace,
            probes=probes,
            layers=layers,
            runs=runs,
            steps=steps,
            top=top,
            gamma=number(gamma),
            awp_steps=awp_steps,
            rho=number(rho),
            sigma0=number(sigma0),
        )
        prefix = named(out) or beside(sources, "curvature")
        check_out(*_files(prefix))
        scale = None if beta is None else number(beta)
        records = _gathered(
            sources, which, sampling, settings, beta=scale, data_folder=data_dir, device=device, resume=resume
        )
        _tell(records)
        for file in _draw(records, prefix):
            say(f"drew {file}")


def _gathered(
    sources: Sequence[Path],
    which: str,
    sampling: Sampling,
    settings: Settings,
    *,
    beta: float | None,
    data_folder: Path | None,
    device: str,
    resume: bool,
) -> list[CurvatureRecord]:
    """One record per checkpoint meant; whether they can be compared and resumed is looked at before any is measured."""
    names = words(which)
    where = pick_device(device)
    found: list[CurvatureRecord | Path] = []
    for source in sources:
        found += [_read(source)] if source.suffix == ".json" else checkpoints(source, names)
    check_alike(
        [
            planned_curvature(item, sampling, settings, beta=beta, data_folder=data_folder, device=where, resume=resume)
            if isinstance(item, Path)
            else item
            for item in found
        ]
    )
    records = []
    with TerminalProgress() as progress:
        for item in found:
            if isinstance(item, CurvatureRecord):
                records.append(item)
                continue
            record, _ = measure_curvature(
                item,
                sampling,
                settings,
                beta=beta,
                data_folder=data_folder,
                device=where,
                resume=resume,
                progress=progress,
            )
            records.append(record)
    return records


def _read(file: Path) -> CurvatureRecord:
    if not file.is_file():
        raise StateError(f"there is no record {file}")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StateError(f"cannot read {file}: {error.strerror or error}") from error
    return CurvatureRecord.from_json(content, str(file))


def _tell(records: Sequence[CurvatureRecord]) -> None:
    """Tables for each loss, and what it all is."""
    for loss in records[0].losses:
        show(curvature_table(records, loss), f"eigenvalues of the Hessian, {loss} loss")
    show(sharpness_table(records), "rise of the loss at the worst weights nearby")
    show(bound_table(records), "terms of the PAC-Bayes bound, without its constant")
    say(caption(records))


def _files(prefix: Path) -> list[Path]:
    return [prefix.with_name(f"{prefix.name}-{figure}.png") for figure in ("spectrum", "layers")]


def _draw(records: Sequence[CurvatureRecord], prefix: Path) -> list[Path]:
    spectra, layers = _files(prefix)
    files = [draw_spectra(records, spectra)]
    if all(found.layers for record in records for found in record.losses.values()):
        files.append(draw_layers(records, layers))
    return files
