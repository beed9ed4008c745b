"""Run -> result: evaluate a checkpoint on its recipe's test set, resumably, and store what came of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatrock.attacks.catalog import Spec
from flatrock.core.device import Devices
from flatrock.core.errors import ConfigError, DataError, FlatrockError
from flatrock.core.files import brief, write_atomic
from flatrock.core.numbers import number
from flatrock.core.progress import Progress
from flatrock.core.records import Finding, Result
from flatrock.core.registry import unknown
from flatrock.core.runs import Run
from flatrock.core.tensorfile import save
from flatrock.core.threat import THREATS, Threat, norm_named
from flatrock.data.dataset import Dataset
from flatrock.data.split import places, some_samples
from flatrock.evaluation.checks import check_seen
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.journal import discard, discard_left_over
from flatrock.evaluation.plans import make_plan
from flatrock.evaluation.votes import check_votes
from flatrock.models.classifier import Classifier
from flatrock.recipes.build import build_threat, check_fit
from flatrock.recipes.leak import tested_on
from flatrock.recipes.part import check_classes, data_part
from flatrock.recipes.restore import (
    Source,
    as_evaluated,
    evaluated_recipe,
    facts,
    open_checkpoint,
    restored,
    tell_doubted,
    unfinished,
)
from flatrock.recipes.schema import Recipe
from flatrock.workflows.replaced import Other, adversarial_file, discard_inputs, other_in
from flatrock.workflows.surrogate import open_surrogate, surrogate_mark, unheeded


def evaluate_run(
    source: Source,
    *,
    which: str = "auto",
    norm: str | None = None,
    eps: float | str | None = None,
    attacks: Sequence[Spec] | None = None,
    surrogate: Source | None = None,
    limit: int | None = None,
    first: bool = False,
    batch_size: int | None = None,
    precision: str = "auto",
    votes: int = 1,
    doubt: bool = False,
    keep_adversarial: bool = False,
    journal: bool = False,
    resume: bool = False,
    data_folder: Path | None = None,
    device: Devices = "cpu",
    seed: int = 0,
    others: Sequence[int] = (),
    progress: Progress | None = None,
    on_data: Callable[[Dataset], None] = unheeded,
) -> Result:
    """Evaluate a trained model on its recipe's test set (a fair subset of it with `limit`, or its `first` samples).

    `norm` and `eps`: another threat than the recipe's. `journal` keeps every finished batch until `store_result`, and
    `resume` goes on from it; `others` are seeds to come. A `surrogate` run crafts inputs too. `on_data` sees the data.
    """
    path, meta, model, recipe = _opened(source, which, progress)
    own, threat = _threats(recipe, norm, eps)
    listed = _listed(recipe, own, threat) if attacks is None else attacks
    test, whole = _test_set(recipe, model, meta, data_folder, limit, first=first)
    on_data(test)
    other = open_surrogate(surrogate, test, progress)
    # The recipe's step sizes are meant for its own threat.
    chosen = other.attacks(listed, recipe.evaluate.attacks if threat == own else listed)
    usual = attacks is None and surrogate is None and len(test) == len(whole) and threat == own
    told = _about(recipe, votes, usual=usual and seed == 0, other_threat=threat != own)
    asked = {**part_of_data(test, whole, first=first), **told}
    about = {**facts(path, recipe, meta), **asked, **other.provenance, **_so_far(path, recipe, progress)}
    how: dict[str, Any] = {"precision": precision, "votes": votes, "doubt": doubt, "keep_adversarial": keep_adversarial}
    how |= {"resume": resume, "seed": seed, "progress": progress, "provenance": about}
    how |= {"noted": _seen(recipe, test, data_folder, progress) if doubt else ()}
    if journal or resume:
        parts = _parts(path.parent, about, other.names(chosen), len(test), (seed, *others), threat, usual=usual)
        how |= {"journal": parts.pop(seed), "others": parts}
    return evaluate(
        model,
        test.images(torch.arange(len(test))),
        test.y,
        threat,
        attacks=chosen,
        surrogate=other.model,
        ids=places(test, whole),
        device=device,
        batch_size=batch_size or recipe.evaluate.batch_size,
        **how,
    )


def _opened(source: Source, which: str, progress: Progress | None) -> tuple[Path, dict[str, Any], Classifier, Recipe]:
    """The checkpoint meant, what is written on it, its model, and its recipe with the attacks it is evaluated with."""
    path, tensors, meta = open_checkpoint(source, which)
    tell_doubted(source, which, path, progress)
    model, recipe = restored(path, tensors, meta, progress)
    return path, meta, model, as_evaluated(path, recipe)


def part_of_data(test: Dataset, whole: Dataset, *, first: bool) -> dict[str, Any]:
    """Which samples are attacked, for the provenance."""
    which = "the first " if first and len(test) < len(whole) else ""
    about = {"data": f"{test.name} test, {which}{len(test)} of {len(whole)} samples"}
    return {**about, "first": True} if which else about


def voted_by(votes: int) -> dict[str, int]:
    """How many answers decide, for the provenance, if it is not one; ConfigError if they cannot."""
    return {"votes": count} if (count := check_votes(votes)) > 1 else {}


def votes_mark(about: Mapping[str, Any]) -> str:
    """For the names of files: `-votes15` where more than one answer decides."""
    return f"-votes{about['votes']}" if "votes" in about else ""


def how_many(about: Mapping[str, Any], samples: int) -> str:
    """For the names of files: `n100`, or `first100` where these are the first ones."""
    return f"{'first' if about.get('first') else 'n'}{samples}"


def _about(recipe: Recipe, votes: int, *, usual: bool, other_threat: bool) -> dict[str, Any]:
    """What was asked of the run."""
    said = {"norm": recipe.threat.norm, "eps": recipe.threat.eps}
    voted = voted_by(votes)
    return {
        "whole_plan": usual and not voted,
        **voted,
        "train_seed": recipe.seed,
        **({"recipe_threat": said} if other_threat else {}),
    }


def _seen(recipe: Recipe, test: Dataset, folder: Path | None, progress: Progress | None) -> list[Finding]:
    """What is to be said of test samples that are training samples."""
    try:
        return check_seen(tested_on(recipe, test, folder), len(test))
    except DataError as error:  # whoever only tests need not have the training set
        if progress is not None:
            progress.say(f"not compared with the training set: {error}")
        return []


def _so_far(path: Path, recipe: Recipe, progress: Progress | None) -> dict[str, str]:
    """Say, and keep, that the run of these weights is not finished; nothing if it is."""
    done, why = unfinished(path, recipe)
    if done and progress is not None:
        progress.say(f"the run is not finished ({done}; {why}): this is {path.name} as it is now")
    return {"unfinished": done} if done else {}


def _threats(recipe: Recipe, norm: str | None, eps: float | str | None) -> tuple[Threat, Threat]:
    """The recipe's own threat, and the one asked for: the same, or another."""
    own, norm = build_threat(recipe), norm_named(norm)
    if norm is not None and norm not in THREATS:
        raise ConfigError(f"norm: {unknown('norm', norm, THREATS)}")
    if eps is None and norm not in (None, own.norm):
        raise ConfigError(
            f"eps: not given; the recipe's {own.eps:.4g} is a radius in {own.norm}, give one in {norm}, such as 128/255"
        )
    try:
        radius = own.eps if eps is None else number(eps)
    except ConfigError as error:
        raise ConfigError(f"eps: {error}") from error
    return own, THREATS[norm or own.norm](radius)


def check_radii(
    source: Source | None, radii: Sequence[str], *, which: str, norm: str | None, attacks: Sequence[Spec] | None
) -> None:
    """Before the first of several evaluations: ConfigError with all radii about which nobody can be asked.

    Without a source they are of a model that is no run.
    """
    recipe = None if source is None else evaluated_recipe(source, which)
    faults = []
    for eps in radii:
        try:
            if recipe is not None:
                own, threat = _threats(recipe, norm, eps)
                if attacks is None:
                    _listed(recipe, own, threat)
            elif (known := norm_named(norm)) in THREATS:  # else it is told with the other faults of the model
                THREATS[known](number(eps))
        except FlatrockError as error:
            faults.append(f"eps {eps}: {error}")
    if faults:
        raise ConfigError("some of these radii cannot be evaluated:", tuple(faults))


def _listed(recipe: Recipe, own: Threat, threat: Threat) -> Sequence[Spec]:
    """The recipe's own attacks, unless their step sizes are those of another threat and would make them weak."""
    sized = [s.label for s in make_plan(recipe.evaluate.attacks) if getattr(s.attack, "step_size", None) is not None]
    if sized and threat != own:
        raise ConfigError(
            f"the recipe's attacks {', '.join(sized)} have step sizes for {own.norm} eps {own.eps:.4g}, not for "
            f"{threat.norm} eps {threat.eps:.4g}; name attacks, such as --attacks pgd-20,cw-20, whose steps follow eps"
        )
    return recipe.evaluate.attacks


def _test_set(
    recipe: Recipe, model: Classifier, meta: Mapping[str, Any], folder: Path | None, limit: int | None, *, first: bool
) -> tuple[Dataset, Dataset]:
    """The recipe's test set, if it is what the model was made for, or some of it; and the whole."""
    whole = data_part(recipe, "test", folder)
    check_fit(model, whole)
    check_classes(whole, meta)
    return some_samples(whole, limit, first=first), whole


def store_result(source: Source, result: Result) -> Path:
    """Write a result of evaluate_run beside its checkpoint; a partial one never takes the name of the whole."""
    target = result_place(source, result)
    write_result(target, result)
    return target


def result_place(source: Source, result: Result) -> Path:
    """The file of a result of evaluate_run."""
    path = source.folder if isinstance(source, Run) else Path(source)
    folder = path.parent if path.is_file() else path
    about = result.provenance
    threat = THREATS[result.threat["norm"]](result.threat["eps"])
    stem = _stem(about, sorted(result.per_attack), result.n, int(about["seed"]), threat)
    return folder / f"{stem}.json"


@dataclass(frozen=True)
class Written:
    """Whether a result was written, not if the file is this very result, and the one whose place it took."""

    new: bool
    other: Other | None = None


def write_result(target: Path, result: Result) -> Written:
    """Store a result, with its inputs if they are kept, and remove the batches it was made of.

    Inputs beside a result of another question are not those of this one: they go once it is stored.
    """
    other = other_in(target, result)
    if result.adversarial is not None:
        save(adversarial_file(target), {"x_adv": result.adversarial}, {"role": "adversarial", **result.provenance})
    text, part = result.to_json().encode(), target.with_suffix(".part")
    if target.is_file() and target.read_bytes() == text:  # it was read: newer batches are another evaluation's
        discard_left_over(part)
        return Written(False)
    write_atomic(target, text)
    if other is not None and result.adversarial is None:
        discard_inputs(target)
    discard(part)
    return Written(True, other)


def _parts(
    folder: Path,
    about: Mapping[str, Any],
    names: Sequence[str],
    samples: int,
    seeds: Sequence[int],
    threat: Threat,
    *,
    usual: bool,
) -> dict[int, Path]:
    """Where the finished batches of each seed are kept until its result is stored."""
    whole = usual and "votes" not in about
    told = {seed: {**about, "whole_plan": whole and seed == 0} for seed in seeds}
    return {seed: folder / f"{_stem(told[seed], names, samples, seed, threat)}.part" for seed in seeds}


def _stem(about: Mapping[str, Any], names: Sequence[str], samples: int, seed: int, threat: Threat) -> str:
    name = f"result-{Path(str(about['checkpoint'])).stem}"
    if about["whole_plan"]:
        return name
    attacks = re.sub(r"[^\w.=-]+", "_", brief("+".join(names)))
    radius = f"-{threat.norm}-{threat.eps:.6g}" if "recipe_threat" in about else ""
    return f"{name}{radius}-{attacks}-{how_many(about, samples)}-seed{seed}{votes_mark(about)}{surrogate_mark(about)}"
