"""`flatrock curvature`: runs, or a model of your own, -> the curvature of losses, as records, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flatrock.cli.console import TerminalProgress, friendly, say, show
from flatrock.cli.drawn_again import check_drawn_again
from flatrock.cli.foreign import Data, Eps, Model, Norm, Normalize, NumClasses, Weights, any_given, check_sources
from flatrock.cli.landscape import Resume, Which
from flatrock.cli.shared import DataDir, beside, check_out, named, numeric, one_device, words
from flatrock.core.errors import StateError
from flatrock.diagnostics.curvature import Settings
from flatrock.diagnostics.curvature_record import CurvatureRecord
from flatrock.reports.curvature import (
    bound_table,
    caption,
    check_alike,
    curvature_table,
    draw_layers,
    draw_spectra,
    same_layers,
    sharpness_table,
)
from flatrock.workflows.checkpoints import checkpoints
from flatrock.workflows.curvature import Sampling, measure_curvature, planned_curvature
from flatrock.workflows.foreign_model import ForeignModel

AGAIN = "the same command with --resume goes on from the last finished part"

Sources = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN...", help="run folders, checkpoints, or .json records measured before"),
]
On = Annotated[str, typer.Option(help="train, held_out or test samples")]
Images = Annotated[int, typer.Option(help="how many samples, equally many of each class")]
AttackName = Annotated[
    str | None,
    typer.Option("--attack", help="of the adversarial loss, e.g. pgd-20; the recipe's select.attack, or pgd-10"),
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
Out = Annotated[
    Path | None, typer.Option(help="figures are OUT-spectrum.png and OUT-layers.png; default: by the run, or here")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda")]
Seed = Annotated[int, typer.Option(help="seed of random vectors and of the attack's random numbers")]


def run(
    ctx: typer.Context,
    sources: Sources = None,
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
    model: Model = None,
    weights: Weights = None,
    data: Data = None,
    num_classes: NumClasses = None,
    normalize: Normalize = None,
    norm: Norm = None,
    eps: Eps = None,
) -> None:
    """Measure the curvature of the clean and the adversarial loss at trained weights: Hessian, sharpness, PAC-Bayes.

    The weights are those of runs, or of one model of your own (--model, --weights).
    """
    own: dict[str, Any] = {"model": model, "weights": weights, "data": data, "num_classes": num_classes}
    own |= {"normalize": normalize, "norm": norm, "eps": eps}
    curved: dict[str, Any] = {"trace": trace, "probes": probes, "layers": layers, "runs": runs, "steps": steps}
    curved |= {"top": top, "awp_steps": awp_steps}
    with friendly(AGAIN):
        check_sources(sources or [], own, "measure")
        check_drawn_again(ctx, sources or [], measures=any_given(own))
        sampling = Sampling(on=on, images=images, attack=attack, precision=precision, batch_size=batch_size, seed=seed)
        curved |= {k: numeric(k, v) for k, v in {"gamma": gamma, "rho": rho, "sigma0": sigma0}.items()}
        settings = Settings(**curved)
        prefix = named(out) or beside([Path()] if any_given(own) else sources or [], "curvature")
        check_out(*_files(prefix))
        how: dict[str, Any] = {"beta": None if beta is None else numeric("beta", beta), "folder": prefix.parent}
        how |= {"data_folder": data_dir, "device": one_device(device), "resume": resume}
        found = _found(sources or [], words(which))
        found += [ForeignModel(**own, which=which)] if any_given(own) else []
        records = _gathered(found, sampling, settings, how)
        _tell(records)
        for file in _draw(records, prefix):
            say(f"drew {file}")


def _found(sources: Sequence[Path], which: Sequence[str]) -> list[CurvatureRecord | Path | ForeignModel]:
    """The records named, and the checkpoints meant."""
    found: list[CurvatureRecord | Path | ForeignModel] = []
    for source in sources:
        found += [_read(source)] if source.suffix == ".json" else checkpoints(source, which)
    return found


def _gathered(
    found: Sequence[CurvatureRecord | Path | ForeignModel],
    sampling: Sampling,
    settings: Settings,
    how: Mapping[str, Any],
) -> list[CurvatureRecord]:
    """One record each; whether they can be compared and resumed is looked at before any is measured."""
    if len(found) > 1:
        check_alike(
            [
                item if isinstance(item, CurvatureRecord) else planned_curvature(item, sampling, settings, **how)
                for item in found
            ]
        )
    with TerminalProgress() as progress:
        return [
            item
            if isinstance(item, CurvatureRecord)
            else measure_curvature(item, sampling, settings, **how, progress=progress)[0]
            for item in found
        ]


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
    if not all(found.layers for record in records for found in record.losses.values()):
        return files
    if not same_layers(records):
        say("networks of different layers: no figure of them; name the records one by one for theirs")
        return files
    return [*files, draw_layers(records, layers)]
