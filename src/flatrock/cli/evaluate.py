"""`flatrock eval`: a run, or a model of your own, -> result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from flatrock.cli.console import TerminalProgress, friendly, say, show
from flatrock.cli.foreign import Data, Model, Normalize, NumClasses, Out, Weights, check_source
from flatrock.cli.shared import check_out, seeds_of
from flatrock.core.device import named_devices
from flatrock.core.errors import ConfigError
from flatrock.core.records import Result
from flatrock.data.dataset import Dataset
from flatrock.evaluation.plans import PLANS, TRANSFER
from flatrock.recipes.evaluate import adversarial_file, evaluate_run, store_result
from flatrock.recipes.foreign import evaluate_foreign, store_foreign
from flatrock.reports.gallery import check_images
from flatrock.reports.gallery import gallery as draw_gallery
from flatrock.reports.samples import write_samples
from flatrock.reports.seeds import evaluated_seeds
from flatrock.reports.table import Table, class_name, comparison, distances, percent, worst_classes
from flatrock.reports.table import per_class as class_table
from flatrock.reports.waterfall import draw_waterfall, waterfall

# So many classes that are equally bad are named; more are counted.
NAMED = 5

Source = Annotated[
    Path | None, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="a run folder or a .safetensors file of one")
]
Attacks = Annotated[
    str | None,
    typer.Option(
        help="comma-separated, e.g. autoattack or fgsm,pgd-50; with options pgd-20:restarts=5; your own: file:name"
    ),
]
Which = Annotated[
    str,
    typer.Option(help="best, last, average-best, average-last; auto = best, averaged if kept; the entry of --weights"),
]
Norm = Annotated[str | None, typer.Option(help="of the threat: linf or l2; a run's own if left out")]
Eps = Annotated[str | None, typer.Option(help="radius of the threat, e.g. 8/255; a run's own if left out")]
Limit = Annotated[int | None, typer.Option(min=1, help="only so many test samples, equally many of each class")]
First = Annotated[bool, typer.Option("--first", help="with --limit: the first so many of the test set instead")]
BatchSize = Annotated[int | None, typer.Option(min=1)]
DataDir = Annotated[Path | None, typer.Option(help="folder with data already there")]
Precision = Annotated[str, typer.Option(help="attacks craft in: auto (half on a GPU), half, full")]
Votes = Annotated[int, typer.Option(help="for models that answer at random: the majority of so many answers decides")]
Doubt = Annotated[bool, typer.Option(help="look for reasons not to believe the number")]
KeepAdversarial = Annotated[bool, typer.Option("--keep-adversarial", help="store the adversarial inputs too")]
Gallery = Annotated[bool, typer.Option("--gallery", help="draw some broken samples as a PNG beside the result")]
PerClass = Annotated[bool, typer.Option("--per-class", help="show the accuracies of each class too")]
Csv = Annotated[Path | None, typer.Option("--csv", help="a .csv file to write: one line per sample")]
Surrogate = Annotated[
    Path | None, typer.Option(help="another run or checkpoint: inputs crafted on it (PGD-20, CW-20) are tried too")
]
Resume = Annotated[bool, typer.Option("--resume", help="go on with an interrupted evaluation")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda; all, or such as cuda:0,cuda:1, to share the work")]
Seed = Annotated[int, typer.Option(help="seed of the attacks' random numbers")]
Seeds = Annotated[str | None, typer.Option(help="such as 0,1,2: an evaluation each, then their mean and spread")]


def run(
    source: Source = None,
    attacks: Attacks = None,
    which: Which = "auto",
    norm: Norm = None,
    eps: Eps = None,
    limit: Limit = None,
    first: First = False,
    batch_size: BatchSize = None,
    data_dir: DataDir = None,
    precision: Precision = "auto",
    votes: Votes = 1,
    doubt: Doubt = True,
    surrogate: Surrogate = None,
    keep_adversarial: KeepAdversarial = False,
    gallery: Gallery = False,
    per_class: PerClass = False,
    csv: Csv = None,
    resume: Resume = False,
    device: Device = "auto",
    seed: Seed = 0,
    seeds: Seeds = None,
    model: Model = None,
    weights: Weights = None,
    data: Data = None,
    num_classes: NumClasses = None,
    normalize: Normalize = None,
    out: Out = None,
) -> None:
    """Evaluate a trained model on its test set under attack: that of a run, or one of your own (--model, --weights)."""
    own: dict[str, Any] = {"model": model, "weights": weights, "data": data, "num_classes": num_classes}
    own |= {"normalize": normalize, "out": out}
    chosen = None if attacks is None else [a.strip() for a in attacks.split(",") if a.strip()]
    shown = _Shown(gallery)
    how: dict[str, Any] = {"which": which, "norm": norm, "eps": eps, "attacks": chosen, "surrogate": surrogate}
    how |= {"limit": limit, "first": first, "batch_size": batch_size, "precision": precision, "doubt": doubt}
    how |= {"votes": votes}
    how |= {"keep_adversarial": keep_adversarial or gallery, "journal": True, "resume": resume, "data_folder": data_dir}
    how |= {"on_data": shown.remember}
    with friendly("the same command with --resume goes on from the last finished batch"):
        check_source(source, own, "evaluate")
        _check_files(out, csv)
        several = _several(seeds, seed, out, csv)
        found: dict[int, Result] = {}
        for number in several or [seed]:
            if several:
                say(f"seed {number}")
            found[number] = _evaluated(source, own, **how, seed=number, device=device)
            kept = found[number] if keep_adversarial else replace(found[number], adversarial=None)
            # Stored before a word is said: who reads only the first lines (| head) has all of it; shown in any case.
            try:
                stored = store_foreign(kept, out) if source is None else store_result(source, kept)
            finally:
                _tell(found[number], shown.names if per_class else None)
            _draw(found[number], stored, shown, csv)
            if keep_adversarial:
                say(f"wrote {adversarial_file(stored)}")
        if several:
            say()
            show(_narrow(evaluated_seeds(found)), "seeds of the attacks")


def _evaluated(source: Path | None, own: Mapping[str, Any], *, device: str, **how: Any) -> Result:
    """The run, or the model of one's own."""
    devices = named_devices(device)
    with TerminalProgress() as progress:
        if source is None:
            return evaluate_foreign(**own, **how, device=devices, progress=progress)
        return evaluate_run(source, **how, device=devices, progress=progress)


def _draw(result: Result, stored: Path, shown: _Shown, csv: Path | None) -> None:
    """What lies beside a result."""
    say(f"wrote {stored}")
    if csv is not None:
        say(f"wrote {write_samples(result, csv)}")
    draw_plans(result, stored)
    shown.draw(result, stored)


def draw_plans(result: Result, stored: Path) -> None:
    """Beside a result: what each attack of its plans took away."""
    for plan in result.plans:
        say(f"drew {draw_waterfall(result, stored.with_name(f'{stored.stem}-{plan}.png'), plan=plan)}")


def _several(seeds: str | None, seed: int, out: Path | None, csv: Path | None) -> list[int]:
    """The seeds of several evaluations, each of which writes its own file; none if there is to be one."""
    if seeds is None:
        return []
    other = {"--seed": seed != 0, "--out": out is not None, "--csv": csv is not None}
    if given := [option for option, is_given in other.items() if is_given]:
        raise ConfigError(f"{', '.join(given)}: of one evaluation, but --seeds asks for several; leave one out")
    return seeds_of(seeds)


class _Shown:
    """The test set, whose classes are named in tables; and some of it in a gallery, if that is wanted."""

    def __init__(self, gallery: bool) -> None:
        self._gallery = gallery
        self._data: Dataset | None = None

    def remember(self, data: Dataset) -> None:
        """Before the evaluation: what cannot be drawn is refused now, not hours later."""
        if self._gallery:
            check_images(data.input_shape)
        self._data = data

    @property
    def names(self) -> tuple[str, ...]:
        """What the classes are called."""
        assert self._data is not None
        return self._data.class_names or tuple(map(str, range(self._data.num_classes)))

    def draw(self, result: Result, stored: Path) -> None:
        """After it: beside the result."""
        if self._data is None or not self._gallery:
            return
        if bool(result.worst.equal(result.flags["clean"])):
            say("no gallery: no attack broke a sample")
            return
        x = self._data.images(torch.arange(len(self._data)))
        file = stored.with_name(f"{stored.stem}-gallery.png")
        say(f"drew {draw_gallery(x, result, file, names=self.names)}")


def _check_files(out: Path | None, csv: Path | None) -> None:
    """What cannot be written is refused now, and so is a table that would take the place of something else."""
    if out is not None:
        check_out(out)
    if csv is not None:
        if csv.suffix != ".csv":
            raise ConfigError(f"csv: {csv} must end in .csv")
        check_out(csv, option="--csv")


def _tell(result: Result, classes: Sequence[str] | None) -> None:
    """The tables, that of these classes only if there are such, and the findings."""
    about = result.provenance
    table = comparison({str(about.get("recipe", about.get("model"))): result})
    show(_narrow(table))
    recipe = about.get("recipe_threat")
    other = f" (the recipe's: {recipe['norm']} eps {recipe['eps']:.4g})" if recipe else ""
    say(
        f"{about['data']}; {result.threat['norm']} eps {result.threat['eps']:.4g}{other}; percent; "
        "worst case = per sample over all attacks named"
    )
    if "votes" in about:
        say(f"{about['votes']} votes decide: a sample is right if more than half of so many answers are")
    if result.robust_rounded != result.robust:
        say(
            f"worst case {percent(result.robust_rounded)} once adversarial inputs are rounded to 8 bits, "
            "as an image file does"
        )
    for plan in result.plans:
        say(f"{plan} = {PLANS[plan][1]}")
    if result.distances:
        say()
        show(distances(result), f"{result.threat['norm']} distance to the nearest adversarial point found")
    for plan in result.plans:
        say()
        show(waterfall(result, plan), f"{plan}: what each attack took away")
    if classes is not None:
        _tell_classes(result, classes)
    tell_findings(result)


def tell_findings(result: Result) -> None:
    """Reasons not to believe a result as it is."""
    for finding in result.findings:
        say(("finding ", "yellow"), str(finding))


def _tell_classes(result: Result, names: Sequence[str]) -> None:
    say()
    show(_narrow(class_table(result, names)), "class by class")
    worst = worst_classes(result)
    if len(worst) == len(result.by_class):
        say(f"no class is worse than the others: {percent(result.robust)} in the worst case")
        return
    called = ", ".join(class_name(c, names) for c in worst) if len(worst) <= NAMED else f"{len(worst)} of {len(names)}"
    robust = percent(result.by_class[worst[0]].robust)
    say(
        f"worst class{'es' if len(worst) > 1 else ''}: {called}, with {robust} in the worst case "
        f"({percent(result.robust)} over all samples)"
    )


def _narrow(table: Table) -> Table:
    """Long names in two lines: many columns must fit into a terminal."""
    return replace(table, header=tuple(h.replace(TRANSFER, f"{TRANSFER}\n").replace(":", "\n:") for h in table.header))
