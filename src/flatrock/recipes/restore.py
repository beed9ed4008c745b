"""From what a run left on disk: its recipe and its model."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.device import pick_device
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.progress import Progress
from flatrock.core.registry import unknown
from flatrock.core.runs import Run
from flatrock.core.tensorfile import load as load_checkpoint
from flatrock.data.dataset import Dataset
from flatrock.engine.checkpoint import put_model
from flatrock.engine.folder import RunFolder
from flatrock.engine.intact import ANOTHER, faults, instead, whole
from flatrock.evaluation.checks import TEST_SELECTED
from flatrock.models.classifier import Classifier
from flatrock.recipes.check import of_trained
from flatrock.recipes.pieces import build_model, recipe_hash
from flatrock.recipes.schema import Recipe

# A run, its folder, or a checkpoint file.
Source = Path | str | Run
# An epoch that a run kept.
EPOCH = re.compile(r"epoch-0*(\d+)")
CHOICES = ("auto", "best", "last", "average-best", "average-last")
# Findings of a run that speak of a checkpoint: docs/diagnostics.md.
SPEAKS_OF = {"T09": "average-best", "T10": "best"}


def open_checkpoint(source: Path | str | Run, which: str = "auto") -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """The weights meant by a run, a run folder or a file, verified; a FAILED run has none to offer.

    `auto` is the best epoch, of the averaged weights where the recipe keeps them.
    """
    path = _place(source)
    if path.is_file():
        if which not in ("auto", path.stem):
            raise ConfigError(f"{path} is one checkpoint, but {which!r} of a run is asked for; name the run folder")
        tensors, meta = load_checkpoint(path)
        if "recipe" not in meta:
            raise StateError(
                f"{path} holds {meta.get('role')!r}, not the weights of a run; name one of its checkpoints"
            )
        return path, tensors, meta
    if not path.is_dir():
        raise StateError(f"there is no run folder or checkpoint {path}")
    if kept := EPOCH.fullmatch(which):
        file = path / f"epoch-{int(kept[1]):04d}.safetensors"
        raise ConfigError(f"checkpoint {which!r} of {path}: an epoch that a run kept is named by its file, {file}")
    if which not in CHOICES:
        raise ConfigError(unknown("checkpoint", which, CHOICES))
    folder = RunFolder(path)
    info = folder.read_info()
    if info["status"] == "failed":
        look = "name a checkpoint file to look at it anyway" if folder.last.exists() else "train it again"
        raise StateError(f"run {path} FAILED ({info.get('reason')}); {look}")
    if which == "auto":
        which = folder.known_by()
    if which.startswith("average") and not info.get("averages"):
        raise StateError(f"{path} keeps no averaged weights; its recipe has no swa under flatness")
    file = path / f"{which}.safetensors"
    if not file.is_file():
        raise StateError(_why_missing(folder, file, which))
    tensors, meta = _loaded(folder, file, which)
    if meta["recipe_hash"] != info["recipe_hash"]:
        raise StateError(f"{file} belongs to another run; put the right file back or train again with --resume")
    return file, tensors, meta


def _loaded(folder: RunFolder, file: Path, which: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint of a run; what is said of one that is damaged names those that are not."""
    try:
        return load_checkpoint(file, role=which)
    except StateError as error:
        told = str(error)
        if not told.endswith(ANOTHER):
            raise
        raise StateError(f"{told.removesuffix(ANOTHER)}; {instead(folder, but=which)}") from error


def _place(source: Source) -> Path:
    """Where a run or checkpoint is said to be."""
    if isinstance(source, Run):
        return source.folder
    if not isinstance(source, str | Path):
        raise ConfigError(f"a run is named by its folder or a checkpoint file, got {source!r}")
    path = Path(source)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        raise StateError(f"{path} is a recipe, not a run; train it first: flatrock train {shlex.quote(str(path))}")
    return path


def _why_missing(folder: RunFolder, file: Path, which: str) -> str:
    records = folder.records()
    if not records:
        return f"{folder.path} has no finished epoch yet; train on with --resume"
    probed = any(record.robust is not None for record in records)
    if which != "last" and not probed:
        return (
            f"no epoch of {folder.path} was probed yet (select.every); look at --which last, or train on with --resume"
        )
    best, one = records[-1].best_epoch, f"{folder.path} has"
    if which == "average-best":
        best, one = records[-1].average_best_epoch, f"the averaged weights of {folder.path} have"
    if which.endswith("best") and best is None:
        others = which.replace("best", "last") + (" or best" if records[-1].best_epoch is not None else "")
        return f"{one} no best epoch: every one predicted a single class; look at --which {others}"
    return f"{file} is lost; {instead(folder, but=which)}"


def eval_command(run: Run, *more: str, look: bool = False) -> str:
    """The command that evaluates a run, of its plain weights where every average collapsed; nothing if all did.

    With `look` the weights are read, and others are named where those meant are damaged; nothing if all are.
    """
    if run.best is None and run.best_average is None:
        return ""
    which = ["--which", "best"] if run.average_collapsed else []
    meant = "average-best" if run.best_average is not None else "best"
    if look and meant in faults(run):
        others = whole(RunFolder(run.folder), but=meant)
        if not others:
            return ""
        which = ["--which", others[0]]
    return shlex.join(["flatrock", "eval", str(run.folder), *which, *more])


def load(source: Path | str | Run, *, which: str = "auto", device: torch.device | str = "cpu") -> Classifier:
    """The trained model of a run folder (its best epoch; see open_checkpoint) or of a checkpoint file, in eval mode."""
    path, tensors, meta = open_checkpoint(source, which)
    tell_doubted(source, which, path, None)
    return restored(path, tensors, meta)[0].to(pick_device(device))


def tell_doubted(source: Source, which: str, path: Path, progress: Progress | None) -> None:
    """Say what the run's findings have against the checkpoint taken, unless somebody asked for that one."""
    if which != "auto" or _place(source).is_file():
        return
    findings = RunFolder(path.parent).read_info().get("findings", ())
    for text in (str(one) for one in findings):
        if SPEAKS_OF.get(text[:3]) != path.stem:
            continue
        if progress is None:
            warnings.warn(text, stacklevel=4)  # of whoever calls flatrock.load
        else:
            progress.say(text)


def restored(
    path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], progress: Progress | None = None
) -> tuple[Classifier, Recipe]:
    """The network with its weights; numbers of weights chosen on the test set will be marked."""
    recipe = trained_recipe(meta["recipe"], f"the recipe stored in {path}", progress)
    model = build_model(recipe)
    put_model(model, tensors, path)
    if recipe.select.data == "test" and str(meta["role"]).endswith("best"):
        model.marks = (TEST_SELECTED,)
    return model.eval(), recipe


def stored_recipe(folder: RunFolder, progress: Progress | None = None) -> Recipe:
    """The recipe a run was trained with; StateError if its file was edited since."""
    recipe = trained_recipe(stored_keys(folder), str(folder.recipe), progress)
    if folder.info.is_file() and recipe_hash(recipe) != folder.owner():
        raise StateError(
            f"{folder.recipe} was edited: its run was trained with another recipe (hash {folder.owner()}, that of the "
            f"file is {recipe_hash(recipe)}); undo that, or take the recipe from a copy of the folder"
        )
    return recipe


def stored_keys(folder: RunFolder) -> dict[str, Any]:
    """What recipe.yaml says; StateError if it is lost or damaged."""
    import yaml

    cure = "`train --resume` writes it again"
    try:
        raw = yaml.safe_load(folder.recipe.read_text())
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise StateError(f"{folder.recipe} is not readable ({error}); {cure}") from error
    if not isinstance(raw, dict):  # an empty file is None, and valid YAML
        raise StateError(
            f"{folder.recipe} is damaged: it must be a mapping of sections, got {type(raw).__name__}; {cure}"
        )
    return raw


def trained_recipe(raw: Mapping[str, Any], where: str, progress: Progress | None = None) -> Recipe:
    """What a run was trained with, to look at the run; what only training would need is told if it is not right."""
    recipe, unsure = of_trained(raw, where)
    if unsure:
        text = "\n  - ".join([f"{where} could not be trained here, which is not needed to look at it:", *unsure])
        if progress is None:
            warnings.warn(text, stacklevel=2)
        else:
            progress.say(text)
    return recipe


def as_evaluated(path: Path, recipe: Recipe) -> Recipe:
    """The recipe of a checkpoint with the attacks that the run's recipe.yaml names, if that trains the same.

    A run that was resumed, or belongs to a table, may have got others since the checkpoint was written. A checkpoint
    without its run is evaluated as it says itself.
    """
    folder = RunFolder(path.parent)
    if not (folder.info.is_file() and folder.recipe.is_file()):
        return recipe
    now = of_trained(stored_keys(folder), str(folder.recipe))[0]  # what is odd was told of the checkpoint
    return recipe.model_copy(update={"evaluate": now.evaluate}) if recipe_hash(now) == recipe_hash(recipe) else recipe


def with_attacks(own: Recipe, asked: Recipe) -> Recipe:
    """The recipe of a run with the evaluations that one asks for which trains the same; itself if they are alike."""
    if own.evaluate == asked.evaluate:
        return own
    return own.model_copy(update={"evaluate": asked.evaluate, "about": asked.about})  # bands are of attacks


def evaluated_recipe(source: Source, which: str = "auto") -> Recipe:
    """The recipe that a checkpoint is evaluated by."""
    path, _, meta = open_checkpoint(source, which)
    return as_evaluated(path, of_trained(meta["recipe"], f"the recipe stored in {path}")[0])


def facts(path: Path, recipe: Recipe, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Where the weights of a run come from."""
    return {
        "recipe": recipe.name,
        "recipe_hash": recipe_hash(recipe),
        "checkpoint": path.name,
        "epoch": meta["record"]["epoch"] if "record" in meta else meta["epoch"],
    }


def unfinished(path: Path, recipe: Recipe) -> tuple[str, str]:
    """How far the run of this checkpoint is, and why not further; nothing if it has ended, or that is not known."""
    folder = RunFolder(path.parent)
    try:
        why = folder.unfinished()
    except StateError:
        return "", ""
    return (f"{len(folder.records())} of {recipe.train.epochs} epochs", why) if why else ("", "")


def check_beside(
    network: Classifier, names: Sequence[str], like: Classifier | Dataset, known: Sequence[str] | None, *, what: str
) -> None:
    """A run's network takes the inputs of a model or of data and knows the same classes, by name; else ConfigError.

    `known` are the names of the latter's classes, None if they are not known yet; `what` begins the message.
    """
    if tuple(network.input_shape) != tuple(like.input_shape):
        raise ConfigError(
            f"{what} takes inputs {tuple(network.input_shape)}, not {tuple(like.input_shape)}; "
            "name a run on the same kind of data"
        )
    if network.num_classes != like.num_classes or (known is not None and list(names) != list(known)):
        raise ConfigError(
            f"{what} has {network.num_classes} classes {list(names)}, not {like.num_classes}"
            f"{'' if known is None else f' {list(known)}'}; name a run on the same classes"
        )
