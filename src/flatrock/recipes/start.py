"""The weights a run begins with (`model.weights`): whose they are, whether they fit, what provenance says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import ConfigError, FlatrockError, StateError
from flatrock.core.progress import Progress
from flatrock.core.tensorfile import is_checkpoint, tensors_digest
from flatrock.data.dataset import Dataset
from flatrock.data.split import Split
from flatrock.engine.folder import RunFolder
from flatrock.models.catalog import NORMALIZATIONS
from flatrock.models.classifier import Classifier
from flatrock.models.foreign import in_numbers, same_normalization
from flatrock.models.pretrained import fitted, load_pretrained, of_file
from flatrock.models.vit import Attention
from flatrock.models.weights import read_weights
from flatrock.models.wrapping import Pair
from flatrock.recipes.draft import Draft
from flatrock.recipes.leak import leak, leak_known, seen_by
from flatrock.recipes.pieces import build_model
from flatrock.recipes.schema import Network, Recipe
from flatrock.recipes.source import how_to_train, open_run


@dataclass(frozen=True)
class _Found:
    """Weights under the names of the network to be filled, where they come from, and a word on it."""

    state: dict[str, Tensor]
    about: dict[str, Any]
    note: str = ""


@dataclass(frozen=True)
class Start:
    """What a run began with: a digest of the weights, and what provenance says of them."""

    digest: str
    about: Mapping[str, Any]


def begin(
    recipe: Recipe,
    model: Classifier,
    data: Dataset,
    split: Split,
    *,
    folder: RunFolder,
    resume: bool,
    progress: Progress,
) -> Start | None:
    """Fill a network, just drawn, with the weights its recipe names; None if it names none.

    Weights that were trained on samples that the `split` holds out are refused. A run that is resumed has weights of
    its own by now: what it began with is looked at if it is there, so that another beginning is noticed, and may be
    gone.
    """
    if recipe.model.weights is None:
        return None
    going_on = resume and folder.begun()
    try:
        start, told = _filled(recipe.model, model, folder.path)
    except StateError as error:  # missing, damaged or of a run not finished; what does not fit is another beginning
        if not going_on:
            raise
        progress.say(f"{error}\nthe run goes on with the weights it has")
        return None
    fault = leak(recipe, data, split, start.about.get("seen", ()))
    if fault and not going_on:
        raise ConfigError(f"model.weights: {fault}")
    if fault or not going_on:
        progress.say(f"{fault}; this run had begun before that was refused, and goes on" if fault else told)
    return start


def _filled(network: Network, model: Classifier, folder: Path) -> tuple[Start, str]:
    """The network with its first weights, and a line about them."""
    source = Path(str(network.weights))
    if folder.resolve() in (source.resolve(), source.resolve().parent):
        raise ConfigError(
            f"model.weights: {source} is of the run folder this run would be written to; choose another with --run-dir "
            "(in Python: folder=...)"
        )
    try:
        found = _open(network, model)
        taken = load_pretrained(model, found.state)
        _check_finite(taken.tensors)
    except FlatrockError as error:
        raise type(error)(f"model.weights: {error}") from error
    head = f"as drawn ({taken.drawn})" if taken.drawn else "taken"
    told = f"begins with the weights of {source}{found.note}"
    told += f"; the head stays {head}" if taken.drawn else ""
    digest = tensors_digest(found.state)
    return Start(digest, {**found.about, "weights": digest, "head": head}), told


def start_faults(draft: Draft) -> list[str]:
    """What is wrong with the beginning of a recipe that has other faults as well, as far as can be told."""
    network = draft.get("model", Network)
    if network is None or network.weights is None:
        return []
    model = draft.model if isinstance(draft.model, Classifier) else None
    return _faults(network, model)


def start_fault(recipe: Recipe) -> str | None:
    """What keeps a recipe from the weights it begins with, in words; None if nothing does."""
    if recipe.model.weights is None:
        return None
    return next(iter(_faults(recipe.model, build_model(recipe))), None)


def leak_fault(recipe: Recipe, data_folder: Path | None) -> str | None:
    """Whether those weights were trained on held-out samples, in words; None if not, or if it cannot be told yet."""
    if recipe.model.weights is None or start_fault(recipe):
        return None
    seen = _open(recipe.model, build_model(recipe)).about.get("seen", ())
    fault = leak_known(recipe, seen, data_folder)
    return fault and f"model.weights: {fault}"


def _faults(network: Network, model: Classifier | None) -> list[str]:
    try:
        if model is None:
            _located(network)
        else:
            found = _open(network, model)
            _check_finite(fitted(model, found.state).tensors)
    except FlatrockError as error:
        return [f"model.weights: {error}"]
    return []


def _located(network: Network) -> Path:
    source = Path(str(network.weights))
    if not source.exists():
        cure = how_to_train(source, "name a run, one of its checkpoints or a weights file")
        raise StateError(f"there is no run folder, checkpoint or weights file {source}; {cure}")
    return source


def _open(network: Network, model: Classifier) -> _Found:
    source = _located(network)
    return _of_run(network, model, source) if source.is_dir() or is_checkpoint(source) else _of_file(network, model)


def _of_run(network: Network, model: Classifier, source: Path) -> _Found:
    """Of a run it is known how it normalised, and how many heads share a transformer's weights."""
    run = open_run(source)
    there, here = run.recipe.model.normalize, network.normalize
    if there != here:
        raise ConfigError(
            f"{run.path} was trained with model.normalize {there!r}, this recipe has {here!r}, under which its weights "
            f"compute something else; say model.normalize={there or 'null'}"
        )
    heads = [{m.heads for m in net.modules() if isinstance(m, Attention)} for net in (run.network, model)]
    if all(heads) and heads[0] != heads[1]:
        raise ConfigError(
            f"{run.path} is a transformer of {heads[0].pop()} heads, this one has {heads[1].pop()} and would read the "
            "same weights in another way; give it as many"
        )
    state = {k: v for k, v in run.network.state_dict().items() if k not in ("mean", "std") and isinstance(v, Tensor)}
    about = {**run.about, "seen": seen_by(run.path, run.recipe, run.about["recipe_hash"])}
    return _Found(state, about, f" (recipe {run.recipe.name}, epoch {run.about['epoch']})")


def _of_file(network: Network, model: Classifier) -> _Found:
    """Of a file of another project it is not known how it normalised unless it says so."""
    file = read_weights(str(network.weights))
    reading = of_file(model, network.name, file)
    own = None if network.normalize is None else NORMALIZATIONS[network.normalize]
    if reading.normalize is not None and not same_normalization(own, reading.normalize):
        raise ConfigError(
            f"{file.file} comes with {in_numbers(reading.normalize)}, this recipe has model.normalize "
            f"{network.normalize!r}, under which its weights compute something else; {_cure(reading.normalize)}"
        )
    about = {"file": file.file.name, "sha256": file.sha256, "entry": file.entry, "averaged": file.averaged}
    entry = f" (entry {file.entry!r}{', averaged weights' if file.averaged else ''})" if file.entry else ""
    unsaid = f"{entry}, which do not tell how inputs were normalised: model.normalize is {network.normalize!r}"
    return _Found(reading.state, about, unsaid if reading.normalize is None else entry)


def _cure(pair: Pair) -> str:
    name = next((n for n, known in NORMALIZATIONS.items() if same_normalization(known, pair)), None)
    return f"say model.normalize={name}" if name else "save it without them to go on with the recipe's"


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    if odd := [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]:
        raise ConfigError(f"the weights are not finite ({len(odd)} tensors, first {odd[0]}); give others")
