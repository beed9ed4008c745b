"""`flatrock certify`: a run, or a model of your own, -> what randomized smoothing proves about it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flatrock.cli.console import TerminalProgress, friendly, say, show
from flatrock.cli.foreign import Data, Model, Normalize, NumClasses, Out, Weights, check_source
from flatrock.cli.shared import DataDir, Source, check_out, numeric
from flatrock.core.device import named_devices
from flatrock.diagnostics.certificate import Certificate
from flatrock.diagnostics.smoothing import Smoothing
from flatrock.reports.certified import certified_table, draw_certified
from flatrock.workflows.certify import certify_run
from flatrock.workflows.foreign_model import ForeignModel

Sigma = Annotated[str, typer.Option(help="deviation of the noise, in pixel units of [0, 1], e.g. 0.25")]
N0 = Annotated[int, typer.Option("--n0", help="votes that choose the class")]
N = Annotated[int, typer.Option("--n", help="fresh votes that bound its probability")]
Alpha = Annotated[float, typer.Option(help="probability that a certificate is wrong")]
Radius = Annotated[str, typer.Option(help="L2 radii wanted, comma-separated; refused if n votes cannot reach them")]
LinfEps = Annotated[str, typer.Option(help="Linf radii wanted, e.g. 2/255, certified through L2")]
Which = Annotated[
    str,
    typer.Option(help="best, last, average-best, average-last; auto = best, averaged if kept; the entry of --weights"),
]
Limit = Annotated[int | None, typer.Option(min=1, help="only so many test samples")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="noisy copies at a time; halved where memory is short")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with an interrupted certification")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda; all, or such as cuda:0,cuda:1, to share the samples")]
Seed = Annotated[int, typer.Option(help="seed of the noise")]


def run(
    sigma: Sigma,
    source: Source = None,
    n0: N0 = 100,
    n: N = 100_000,
    alpha: Alpha = 0.001,
    radius: Radius = "",
    linf_eps: LinfEps = "",
    which: Which = "auto",
    limit: Limit = None,
    batch_size: BatchSize = None,
    data_dir: DataDir = None,
    resume: Resume = False,
    device: Device = "auto",
    seed: Seed = 0,
    model: Model = None,
    weights: Weights = None,
    data: Data = None,
    num_classes: NumClasses = None,
    normalize: Normalize = None,
    out: Out = None,
) -> None:
    """Smooth a trained model with Gaussian noise and certify L2 radii around its test samples (Cohen et al. 2019).

    The model is that of a run, or one of your own (--model, --weights).
    """
    own: dict[str, Any] = {"model": model, "weights": weights, "data": data}
    own |= {"num_classes": num_classes, "normalize": normalize}
    with friendly("the same command with --resume goes on from the last finished sample"):
        check_source(source, own | {"out": out}, "certify", threat=False)
        if out is not None:
            check_out(out)
        smoothing = Smoothing(sigma=numeric("sigma", sigma), n0=n0, n=n, alpha=alpha)
        radii, eps = _numbers("radius", radius), _numbers("linf-eps", linf_eps)
        with TerminalProgress() as progress:
            found, stored = certify_run(
                ForeignModel(**own, which=which) if source is None else source,
                smoothing,
                which="auto" if source is None else which,
                radii=radii,
                linf_eps=eps,
                limit=limit,
                batch_size=batch_size,
                out=out,
                resume=resume,
                data_folder=data_dir,
                device=named_devices(device),
                seed=seed,
                progress=progress,
            )
        wanted = [*radii, *(found.l2_of(e) for e in eps)]
        _tell(found, wanted)
        say(f"drew {draw_certified({_name(found): found}, stored.with_suffix('.png'), radii=wanted)}")


def _numbers(option: str, text: str) -> list[float]:
    return [numeric(option, part) for part in text.split(",") if part.strip()]


def _name(found: Certificate) -> str:
    about = found.provenance
    return str(about.get("recipe", about.get("model")))


def _tell(found: Certificate, radii: list[float]) -> None:
    about, s = found.provenance, found.smoothing
    show(certified_table(found, radii), f"{_name(found)}, sigma {s.sigma:g}: certified accuracy")
    say(
        f"{about['data']}; n0 {s.n0}, n {s.n}, alpha {s.alpha:g}: radii up to {s.largest_radius:.4f}; "
        f"smoothed accuracy without attack {100 * found.accuracy:.2f} %, nothing proved for "
        f"{100 * found.abstained:.2f} % of the samples"
    )
    if note := _noise_note(found):
        say(("note ", "yellow"), note)
    if found.no_answer:
        say(("note ", "yellow"), f"{found.no_answer} votes were NaN or infinite and count for no class")
    if found.marks:
        say(("note ", "yellow"), f"{', '.join(found.marks)}: the checkpoint was chosen by looking at the test set")


def _noise_note(found: Certificate) -> str:
    """What is to be said of the noise the network was trained on; nothing if it is the noise that smoothing adds."""
    sigma = found.smoothing.sigma
    if "trained_with" not in found.provenance:
        return f"not a run: it is not known whether it was trained on noise of sigma {sigma:g}, which certifies most"
    trained = found.provenance["trained_with"]
    if trained is None:
        with_noise = f"attack: {{name: gaussian, sigma: {sigma:g}}}"
        return f"trained without Gaussian noise, which smoothing adds; a recipe trains with it that has {with_noise}"
    return "" if trained == sigma else f"trained with noise of sigma {trained:g}; the same sigma usually certifies most"
