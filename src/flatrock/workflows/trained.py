"""A trained network to be looked at, of a run or not: with its data, its threat, and where it comes from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from flatrock.attacks.catalog import parse_attack
from flatrock.attacks.craft import check_weights
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.files import brief, json_text, sha256
from flatrock.core.guests import told_code
from flatrock.core.identity import ANSWERS
from flatrock.core.progress import Progress, Silent
from flatrock.core.tensorfile import weights_digest
from flatrock.core.threat import Threat
from flatrock.data.dataset import Dataset
from flatrock.diagnostics.ledger import begun
from flatrock.engine.folder import RunFolder
from flatrock.models.foreign import Foreign
from flatrock.recipes.build import build_threat, check_fit
from flatrock.recipes.part import check_classes, data_part
from flatrock.recipes.restore import Source, facts, open_checkpoint, restored
from flatrock.recipes.schema import Recipe, Select
from flatrock.workflows.foreign_model import ForeignModel, caught, examine, in_names, known_answers, part_faults

AttackSpec = str | Mapping[str, Any]
Record = TypeVar("Record")
# How the news begins that a record was replaced, and what of an identity makes no other question.
REPLACED = "replaced the record of another measurement"
HOW = frozenset({"flatrock", "batch_size", "device"})


@dataclass(frozen=True)
class Trained:
    """A network in eval mode, and what a measurement needs to know of it.

    Its records go into `folder`, under names with `stem` in them, and say `about` in their provenance. `part` gives
    its train, held_out or test samples, `examine` refuses data that it was not made for and returns what tells it,
    beside its weights, from others. `attack` is what it is attacked with unless told otherwise. Only a run has a
    `recipe`; `threat` is None where none was asked for.
    """

    model: nn.Module
    name: str
    folder: Path
    stem: str
    about: dict[str, Any]
    part: Callable[[str], Dataset]
    examine: Callable[[Dataset, torch.device], dict[str, Any]]
    threat: Threat | None
    attack: AttackSpec
    digest: str
    marks: tuple[str, ...] = ()
    recipe: Recipe | None = None

    @property
    def title(self) -> str:
        """What it is called while it is measured."""
        return self.name if self.recipe is None else f"{self.name}/{self.stem}"

    @property
    def threatened(self) -> Threat:
        """The threat, which must have been asked for."""
        assert self.threat is not None
        return self.threat


def said(on: str, data: Dataset, whole: int) -> str:
    """Which samples these are, in words."""
    return f"{data.name} {on.replace('_', '-')}, {len(data)} of {whole} samples"


def open_trained(
    source: Source | ForeignModel,
    *,
    what: str,
    on: str,
    which: str = "auto",
    attack: AttackSpec | None = None,
    threat: bool = True,
    faults: Callable[[], list[str]] = list,
    folder: Path = Path(),
    data_folder: Path | None = None,
    progress: Progress | None = None,
) -> Trained:
    """The network of a run (the checkpoint `which` of it), or one that is no run, whose records go into `folder`.

    What is wrong with the latter, with the samples and the attack asked for, and other `faults`, is one error: `what`
    cannot start.
    """
    if not isinstance(source, ForeignModel):
        if wrong := faults():
            raise ConfigError(f"the {what} cannot start:", tuple(wrong))
        return _of_run(source, which, data_folder, progress)
    if which != "auto":
        raise ConfigError(f"which={which!r} is of a run; say ForeignModel(which={which!r})")
    wrong = [*part_faults(on), *([] if attack is None else caught("attack", lambda: parse_attack(attack))), *faults()]
    source.check(what=what, faults=wrong, threat=threat)
    foreign = source.opened(progress or Silent())
    return _of_foreign(source, foreign, source.threat if threat else None, folder, data_folder)


def _of_run(source: Source, which: str, data_folder: Path | None, progress: Progress | None) -> Trained:
    path, tensors, meta = open_checkpoint(source, which)
    model, recipe = restored(path, tensors, meta, progress)

    def fits(data: Dataset, where: torch.device) -> dict[str, Any]:
        check_fit(model, data)
        check_classes(data, meta)
        return told_code(model)

    run, known = path.resolve().parent.name, training_set(path, meta)
    return Trained(
        model,
        name=run,
        folder=path.parent,
        stem=path.stem,
        about={"run": run, **facts(path, recipe, meta), "train_seed": recipe.seed},
        part=lambda on: data_part(recipe, on, data_folder, training_set=known, run=path.parent),
        examine=fits,
        threat=build_threat(recipe),
        attack=recipe.select.attack,
        digest=weights_digest(model),
        marks=model.marks,
        recipe=recipe,
    )


def training_set(path: Path, meta: Mapping[str, Any]) -> str | None:
    """The digest of the training set of a checkpoint's run; None where run.json does not tell."""
    try:
        info = RunFolder(path.parent).read_info()
    except StateError:
        return None
    known = info.get("provenance", {}).get("training_set")
    return known if info["recipe_hash"] == meta["recipe_hash"] else None


def _of_foreign(
    asked: ForeignModel, foreign: Foreign, threat: Threat | None, folder: Path, data_folder: Path | None
) -> Trained:
    def fits(data: Dataset, where: torch.device) -> dict[str, Any]:
        examine(foreign, data, where, asked.num_classes)
        chosen = {} if asked.dataset == data.name else {"dataset": asked.dataset}
        return {ANSWERS: known_answers(foreign.model, data, where), **chosen, **told_code(foreign.model)}

    check_weights(foreign.model)
    weights = weights_digest(foreign.model)
    return Trained(
        foreign.model,
        name=foreign.name,
        folder=folder,
        stem=_stem(asked, foreign, weights, threat),
        about=foreign.about,
        part=partial(asked.part, folder=data_folder),
        examine=fits,
        threat=threat,
        attack=Select().attack,
        digest=weights,
    )


def stored(target: Path, read: Callable[[Path], Record], *, must: bool) -> Record | None:
    """The record that lies where one is to be; one that is damaged is an error only if it `must` be read."""
    if not target.is_file():
        return None
    try:
        return read(target)
    except StateError:
        if must:
            raise
        return None


def check_replaced(
    trained: Trained, target: Path, odd: Sequence[str], *, identity: Mapping[str, Any], data: str = "data"
) -> None:
    """StateError if going on would write over a record of something else.

    Runs keep their records apart, in folders: only one of other samples, in which `data` differs, is something else.
    Who has begun to replace it, by `identity`, was asked before.
    """
    if begun(target.with_suffix(".part"), identity):
        return
    if data in odd or (trained.recipe is None and odd):
        told = ", ".join(_words(odd))
        raise StateError(
            f"{target} is a record of something else (different: {told}); keep it under another name, or leave out "
            "--resume (with overfit: say --fresh) to write over it"
        )


def tell_replaced(odd: Iterable[str], progress: Progress | None) -> None:
    """Say that a record took the place of one of another question, if it did."""
    told = _words(set(odd) - HOW)
    if told and progress is not None:
        progress.say(f"{REPLACED} (different: {', '.join(told)})")


def _words(odd: Iterable[str]) -> list[str]:
    return sorted({"data" if name == "dataset" else name.removesuffix("_digest") for name in odd})


def _stem(asked: ForeignModel, foreign: Foreign, weights: str, threat: Threat | None) -> str:
    """<model>-<data>-<threat>-<digest of all that makes it another network or question>."""
    radius = [] if threat is None else [f"{threat.norm}{threat.eps:.4g}"]
    words = re.sub(r"[^\w.=+-]+", "_", "-".join([brief(foreign.name), in_names(asked.dataset), *radius]))
    told = [weights, *(foreign.about[name] for name in ("model", "weights_entry", "normalize"))]
    exact = [] if threat is None else [threat.norm, threat.eps]
    return f"{words}-{sha256(json_text([told, asked.dataset, exact]))[:8]}"
