"""From what a run left on disk: its recipe, its model, its evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.device import pick_device
from flatrock.core.errors import ConfigError, DataError, StateError
from flatrock.core.files import write_atomic
from flatrock.core.progress import Progress
from flatrock.core.records import Result, Run
from flatrock.core.registry import unknown
from flatrock.core.tensorfile import load as load_checkpoint
from flatrock.data.catalog import load_data
from flatrock.data.split import fair_subset
from flatrock.engine.checkpoint import put_model
from flatrock.engine.folder import RunFolder
from flatrock.evaluation.checks import TEST_SELECTED
from flatrock.evaluation.evaluate import evaluate
from flatrock.models.classifier import Classifier
from flatrock.recipes.build import build_model, build_threat, check_fit, recipe_hash
from flatrock.recipes.check import validate
from flatrock.recipes.schema import Recipe

CHOICES = ("auto", "best", "last", "average-best", "average-last")


def open_checkpoint(source: Path | str | Run, which: str = "auto") -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """The weights meant by a run, a run folder or a file, verified; a FAILED run has none to offer.

    `auto` is the best epoch, of the averaged weights where the recipe keeps them.
    """
    path = source.folder if isinstance(source, Run) else Path(source)
    if path.is_file():
        return path, *load_checkpoint(path)
    if not path.is_dir():
        raise StateError(f"there is no run folder or checkpoint {path}")
    if which not in CHOICES:
        raise ConfigError(unknown("checkpoint", which, CHOICES))
    folder = RunFolder(path)
    info = folder.read_info()
    if info["status"] == "failed":
        raise StateError(f"run {path} FAILED ({info.get('reason')}); name a checkpoint file to look at it anyway")
    if which == "auto":
        which = "average-best" if info.get("averages") else "best"
    if which.startswith("average") and not info.get("averages"):
        raise StateError(f"{path} keeps no averaged weights; its recipe has no swa under flatness")
    file = path / f"{which}.safetensors"
    if not file.is_file():
        raise StateError(_why_missing(folder, file, which))
    tensors, meta = load_checkpoint(file, role=which)
    if meta["recipe_hash"] != info["recipe_hash"]:
        raise StateError(f"{file} belongs to another run; put the right file back or train again with --resume")
    return file, tensors, meta


def _why_missing(folder: RunFolder, file: Path, which: str) -> str:
    records = folder.records()
    if not records:
        return f"{folder.path} has no finished epoch yet; train on with --resume"
    best = records[-1].average_best_epoch if which == "average-best" else records[-1].best_epoch
    if which.endswith("best") and best is None:
        other = which.replace("best", "last")
        return f"{folder.path} has no best epoch: every one predicted a single class; look at --which {other}"
    return f"{file} is lost; look at the run's other checkpoints"


def load(source: Path | str | Run, *, which: str = "auto", device: torch.device | str = "cpu") -> Classifier:
    """The trained model of a run folder (its best epoch; see open_checkpoint) or of a checkpoint file, in eval mode."""
    path, tensors, meta = open_checkpoint(source, which)
    return _model(path, tensors, meta)[0].to(pick_device(device))


def _model(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> tuple[Classifier, Recipe]:
    """The network with its weights; numbers of weights chosen on the test set will be marked."""
    recipe = validate(meta["recipe"], f"the recipe stored in {path}")
    model = build_model(recipe)
    put_model(model, tensors, path)
    if recipe.select.data == "test" and str(meta["role"]).endswith("best"):
        model.marks = (TEST_SELECTED,)
    return model.eval(), recipe


def evaluate_run(
    source: Path | str | Run,
    *,
    which: str = "auto",
    attacks: Sequence[str | Mapping[str, Any]] | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Evaluate a trained model on its recipe's test set (a fair subset of it with `limit`)."""
    path, tensors, meta = open_checkpoint(source, which)
    model, recipe = _model(path, tensors, meta)
    whole = load_data(recipe.data.name, "test", folder=data_folder, **recipe.data.options)
    check_fit(model, whole)
    if list(whole.class_names) != meta["class_names"]:
        raise DataError(f"the test data have classes {list(whole.class_names)}, the model has {meta['class_names']}")
    test = fair_subset(whole, limit)
    return evaluate(
        model,
        test.images(torch.arange(len(test))),
        test.y,
        build_threat(recipe),
        attacks=recipe.evaluate.attacks if attacks is None else attacks,
        device=device,
        batch_size=batch_size or recipe.evaluate.batch_size,
        seed=seed,
        progress=progress,
        provenance={
            "recipe": recipe.name,
            "recipe_hash": recipe_hash(recipe),
            "checkpoint": path.name,
            "epoch": meta["record"]["epoch"] if "record" in meta else meta["epoch"],
            "data": f"{test.name} test, {len(test)} of {len(whole)} samples",
            "whole_plan": attacks is None and len(test) == len(whole),
            "train_seed": recipe.seed,
        },
    )


def store_result(source: Path | str | Run, result: Result) -> Path:
    """Write a result of evaluate_run beside its checkpoint; a partial one never takes the name of the whole."""
    path = source.folder if isinstance(source, Run) else Path(source)
    folder = path.parent if path.is_file() else path
    name = f"result-{Path(str(result.provenance['checkpoint'])).stem}"
    if not result.provenance["whole_plan"]:
        attacks = re.sub(r"[^\w.=-]+", "_", "+".join(result.per_attack))[:80]
        name += f"-{attacks}-n{result.n}-seed{result.provenance['seed']}"
    target = folder / f"{name}.json"
    write_atomic(target, result.to_json().encode())
    return target
