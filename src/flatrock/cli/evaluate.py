"""`flatrock eval`: a run, or a model of your own, -> result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flatrock.cli.console import TerminalProgress, friendly, say, show
from flatrock.cli.evaluated import Shown, called, draw, narrow, store
from flatrock.cli.foreign import Data, Model, Normalize, NumClasses, Out, Weights, check_source
from flatrock.cli.shared import DataDir, Source, check_csv, check_out, radii_of, seeds_of, words
from flatrock.core.device import named_devices
from flatrock.core.errors import ConfigError
from flatrock.core.records import Result
from flatrock.recipes.further import measures_of, options_of, surrogates, where_of
from flatrock.recipes.restore import CHOICES, evaluated_recipe
from flatrock.reports.checkpoints import BEST, checkpoint_table, chosen_by
from flatrock.reports.radii import draw_radii, evaluated_radii
from flatrock.reports.seeds import evaluated_seeds
from flatrock.workflows.checkpoints import checkpoints
from flatrock.workflows.evaluate import check_radii, evaluate_run, result_place
from flatrock.workflows.foreign import evaluate_foreign, foreign_place
from flatrock.workflows.replaced import adversarial_file
from flatrock.workflows.surrogate import surrogate_fault

Attacks = Annotated[
    str | None,
    typer.Option(
        help="comma-separated, e.g. autoattack or fgsm,pgd-50; with options pgd-20:restarts=5; your own: file:name"
    ),
]
Which = Annotated[
    str,
    typer.Option(
        help="comma-separated: best, last, average-best, average-last, epoch-10; kept = every epoch kept; auto = best, "
        "averaged if kept; the entry of --weights"
    ),
]
Norm = Annotated[str | None, typer.Option(help="of the threat: linf or l2; a run's own if left out")]
Eps = Annotated[
    str | None,
    typer.Option(help="radius of the threat, e.g. 8/255, or several: 2/255,4/255,8/255; a run's own if left out"),
]
Limit = Annotated[int | None, typer.Option(min=1, help="only so many test samples, equally many of each class")]
First = Annotated[bool, typer.Option("--first", help="with --limit: the first so many of the test set instead")]
BatchSize = Annotated[int | None, typer.Option(min=1)]
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
    shown = Shown(gallery)
    how: dict[str, Any] = {"which": which, "norm": norm, "attacks": chosen, "surrogate": surrogate}
    how |= {"limit": limit, "first": first, "batch_size": batch_size, "precision": precision, "doubt": doubt}
    how |= {"votes": votes}
    how |= {"keep_adversarial": keep_adversarial or gallery, "journal": True, "resume": resume, "data_folder": data_dir}
    how |= {"on_data": shown.remember}
    with friendly("the same command with --resume goes on from the last finished batch"):
        check_source(source, own, "evaluate")
        _check_files(out, csv)
        asked = _asked(seeds, seed, eps, out, csv)
        files = _checkpoints(source, which)
        _check_one(files, asked, csv)
        if len(files) == 1:
            (source,), how["which"] = files, "auto"
        if seeds is None and len(asked) > 1:
            check_radii(source, list(asked), which=how["which"], norm=norm, attacks=chosen)
        ask = _Asker(source, own, how, device, shown, per_class=per_class, keep_adversarial=keep_adversarial)
        usual = seeds is None and seed == 0 and votes == 1 and not (chosen or norm or eps or surrogate or limit)
        if len(files) > 1:
            _ask_each(ask, files, asked[""], usual=usual)
        else:
            _ask_one(ask, asked, csv, by="eps" if seeds is None else "seed", usual=usual)


@dataclass(frozen=True)
class _Asker:
    """Evaluates the run, or the model of one's own; stores, tells and draws what came of it."""

    source: Path | None
    own: Mapping[str, Any]
    how: Mapping[str, Any]
    device: str
    shown: Shown
    per_class: bool
    keep_adversarial: bool

    def __call__(self, title: str, *, csv: Path | None = None, **differs: Any) -> tuple[Result, Path]:
        """The result and its file; `differs` are options beside those of the command, or in their place."""
        if title:
            say(title)
        result = self._evaluated(**{**self.how, **differs})
        place = foreign_place(result) if self.source is None else result_place(self.source, result)
        place = self.own["out"] or place
        classes = self.shown.names if self.per_class else None
        store(result, place, called(self.source, result), classes, keep_adversarial=self.keep_adversarial)
        draw(result, place, self.shown, csv)
        if self.keep_adversarial:
            say(f"wrote {adversarial_file(place)}")
        return result, place

    def _evaluated(self, **how: Any) -> Result:
        devices = named_devices(self.device)
        with TerminalProgress() as progress:
            if self.source is None:
                return evaluate_foreign(**self.own, **how, device=devices, progress=progress)
            return evaluate_run(self.source, **how, device=devices, progress=progress)


def _ask_one(ask: _Asker, asked: Mapping[str, Mapping[str, Any]], csv: Path | None, *, by: str, usual: bool) -> None:
    """One checkpoint, or a model of one's own: by radius or seed, if there are several, and a table of all."""
    found: dict[str, Result] = {}
    for name, differs in asked.items():
        found[name], place = ask(f"{by} {name}" if name else "", csv=csv, **differs)
    if len(found) > 1:
        _tell_several(found, place, called(ask.source, found[name]), radii=by == "eps")
    elif ask.source is not None and usual:
        _tell_lost(_ask_further(ask, ask.source)[1])


def _ask_further(ask: _Asker, source: Path) -> tuple[list[tuple[str, Result]], list[str]]:
    """What the recipe asks beside its own evaluation, each in a file of its own: the results, each with what tells it
    from that one, and why some could not be made."""
    recipe = evaluated_recipe(source, ask.how["which"])
    places = {str(place): (key, place) for key, place in surrogates(recipe).items()}
    lost = {text: fault for text, (key, place) in places.items() if (fault := surrogate_fault(recipe, key, place))}
    found = []
    for one in recipe.evaluate.more:
        if one.surrogate not in lost:
            say()
            result, _ = ask(f"further: {', '.join(measures_of(one, recipe.threat))}", seed=0, **options_of(one))
            found.append((where_of(one, recipe.threat), result))
    return found, list(lost.values())


def _ask_each(ask: _Asker, files: Sequence[Path], differs: Mapping[str, Any], *, usual: bool) -> None:
    """Several checkpoints of a run, one after the other, and a table of all."""
    found: dict[str, list[tuple[str, Result]]] = {}
    lost: dict[str, None] = {}
    for nth, file in enumerate(files, 1):
        one = replace(ask, source=file, how={**ask.how, "which": "auto"})
        found[file.stem] = [("", one(f"{file.stem}, {nth} of {len(files)}", **differs)[0])]
        more, missing = _ask_further(one, file) if usual else ([], [])
        found[file.stem] += more
        lost |= dict.fromkeys(missing)
        say()
    name, measure = chosen_by(found)
    show(narrow(checkpoint_table(found)), f"{files[0].absolute().parent.name}, checkpoint by checkpoint")
    say(
        f"* {BEST}: the highest of these checkpoints under each attack, chosen on the test set, each maybe of another "
        f"one; clean is that of {name}, the highest under {measure}"
    )
    _tell_lost(list(lost))


def _tell_lost(faults: Sequence[str]) -> None:
    """ConfigError that names the runs without which some evaluations could not be made."""
    if faults:
        raise ConfigError("all is stored but for what is crafted on other runs:", tuple(faults))


def _checkpoints(source: Path | None, which: str) -> list[Path]:
    """The checkpoints of a run folder that are named by epoch, or several of them; none: `which` is the one."""
    if source is None or not source.is_dir() or which in CHOICES:
        return []
    return checkpoints(source, words(which))


def _check_one(files: Sequence[Path], asked: Mapping[str, Any], csv: Path | None) -> None:
    """Of several checkpoints one thing is asked."""
    if len(files) > 1 and (len(asked) > 1 or csv is not None):
        what = "--csv" if csv is not None else "--seeds, or --eps with several radii,"
        raise ConfigError(f"{what} is of one checkpoint, but --which names {len(files)}; leave one out")


def _tell_several(found: Mapping[str, Result], last: Path, name: str, *, radii: bool) -> None:
    """One table of several evaluations; over radii also a curve, beside the last result."""
    say()
    if not radii:
        show(narrow(evaluated_seeds({int(seed): result for seed, result in found.items()})), "seeds of the attacks")
        return
    show(narrow(evaluated_radii(found)), f"{name}, radius by radius")
    say(f"drew {draw_radii(found, last.with_name(f'{last.stem}-over-eps.png'), name=name)}")


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


def _check_files(out: Path | None, csv: Path | None) -> None:
    """What cannot be written is refused now, and so is a table that would take the place of something else."""
    if out is not None:
        check_out(out)
    if csv is not None:
        check_csv(csv)
