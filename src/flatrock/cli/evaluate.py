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
from flatrock.cli.shared import check_csv, check_out, radii_of, seeds_of
from flatrock.core.device import named_devices
from flatrock.core.errors import ConfigError
from flatrock.core.records import Result
from flatrock.data.dataset import Dataset
from flatrock.evaluation.plans import PLANS, TRANSFER
from flatrock.recipes.evaluate import adversarial_file, check_radii, evaluate_run, result_place, write_result
from flatrock.recipes.foreign import evaluate_foreign, foreign_place
from flatrock.reports.gallery import check_images
from flatrock.reports.gallery import gallery as draw_gallery
from flatrock.reports.radii import draw_radii, evaluated_radii
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
Eps = Annotated[
    str | None,
    typer.Option(help="radius of the threat, e.g. 8/255, or several: 2/255,4/255,8/255; a run's own if left out"),
]
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
Seeds = Annotated[str | None, typer.Option(help="such as 0,1,2 or 0-4: an evaluation each, then their mean and spread")]


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
    how: dict[str, Any] = {"which": which, "norm": norm, "attacks": chosen, "surrogate": surrogate}
    how |= {"limit": limit, "first": first, "batch_size": batch_size, "precision": precision, "doubt": doubt}
    how |= {"votes": votes}
    how |= {"keep_adversarial": keep_adversarial or gallery, "journal": True, "resume": resume, "data_folder": data_dir}
    how |= {"on_data": shown.remember}
    with friendly("the same command with --resume goes on from the last finished batch"):
        check_source(source, own, "evaluate")
        _check_files(out, csv)
        asked = _asked(seeds, seed, eps, out, csv)
        if seeds is None and len(asked) > 1:
            check_radii(source, list(asked), which=which, norm=norm, attacks=chosen)
        found: dict[str, Result] = {}
        for name, differs in asked.items():
            if name:
                say(f"{'eps' if seeds is None else 'seed'} {name}")
            result = found[name] = _evaluated(source, own, **how, **differs, device=device)
            place = (out or foreign_place(result)) if source is None else result_place(source, result)
            model_name, classes = _called(source, result), shown.names if per_class else None
            _store(result, place, model_name, classes, keep_adversarial=keep_adversarial)
            _draw(result, place, shown, csv)
            if keep_adversarial:
                say(f"wrote {adversarial_file(place)}")
        if len(found) > 1:
            _tell_several(found, place, model_name, radii=seeds is None)


def _tell_several(found: Mapping[str, Result], last: Path, name: str, *, radii: bool) -> None:
    """One table of several evaluations; over radii also a curve, beside the last result."""
    say()
    if not radii:
        show(_narrow(evaluated_seeds({int(seed): result for seed, result in found.items()})), "seeds of the attacks")
        return
    show(_narrow(evaluated_radii(found)), f"{name}, radius by radius")
    say(f"drew {draw_radii(found, last.with_name(f'{last.stem}-over-eps.png'), name=name)}")


def _evaluated(source: Path | None, own: Mapping[str, Any], *, device: str, **how: Any) -> Result:
    """The run, or the model of one's own."""
    devices = named_devices(device)
    with TerminalProgress() as progress:
        if source is None:
            return evaluate_foreign(**own, **how, device=devices, progress=progress)
        return evaluate_run(source, **how, device=devices, progress=progress)


def _called(source: Path | None, result: Result) -> str:
    """The name of the run's folder, as several runs may have one recipe; without a run that of the recipe or model."""
    about = result.provenance
    folder = None if source is None else (source if source.is_dir() else source.parent).resolve()
    known = folder is not None and (folder / "run.json").is_file()
    return folder.name if folder is not None and known else str(about.get("recipe", about.get("model")))


def _store(result: Result, place: Path, name: str, classes: Sequence[str] | None, *, keep_adversarial: bool) -> None:
    """Stored before a word is said: who reads only the first lines (| head) has all of it; told in any case."""
    try:
        written = write_result(place, result if keep_adversarial else replace(result, adversarial=None))
    finally:
        _tell(result, name, classes)
    say(f"wrote {place}" if written else f"nothing to write: {place} is there already")


def _draw(result: Result, stored: Path, shown: _Shown, csv: Path | None) -> None:
    """What lies beside a result."""
    if csv is not None:
        say(f"wrote {write_samples(result, csv)}")
    draw_plans(result, stored)
    shown.draw(result, stored)


def draw_plans(result: Result, stored: Path) -> None:
    """Beside a result: what each attack of its plans took away."""
    for plan in result.plans:
        say(f"drew {draw_waterfall(result, stored.with_name(f'{stored.stem}-{plan}.png'), plan=plan)}")


def _asked(
    seeds: str | None, seed: int, eps: str | None, out: Path | None, csv: Path | None
) -> dict[str, dict[str, Any]]:
    """In what several evaluations differ, each of which writes its own file, by name; without one if there is one."""
    radii = radii_of(eps)
    if seeds is None and not radii:
        return {"": {"seed": seed, "eps": eps}}
    other = {"--seed": seeds is not None and seed != 0, "--out": out is not None, "--csv": csv is not None}
    other["--eps with several radii"] = seeds is not None and bool(radii)
    if given := [option for option, is_given in other.items() if is_given]:
        what = "--eps" if seeds is None else "--seeds"
        raise ConfigError(f"{', '.join(given)}: of one evaluation, but {what} asks for several; leave one out")
    if seeds is None:
        return {radius: {"seed": seed, "eps": radius} for radius in radii}
    numbers = seeds_of(seeds)
    return {str(n): {"seed": n, "eps": eps, "others": numbers[nth:]} for nth, n in enumerate(numbers, 1)}


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
        check_csv(csv)


def _tell(result: Result, name: str, classes: Sequence[str] | None) -> None:
    """The tables, that of these classes only if there are such, and the findings."""
    about = result.provenance
    show(_narrow(comparison({name: result})))
    recipe = about.get("recipe_threat")
    other = f" (the recipe's: {recipe['norm']} eps {recipe['eps']:.4g})" if recipe else ""
    made = f"recipe {about['recipe']}; " if about.get("recipe", name) != name else ""
    say(
        f"{made}{about['data']}; {result.threat['norm']} eps {result.threat['eps']:.4g}{other}; percent; "
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
