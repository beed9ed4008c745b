"""From what a run left on disk: its recipe, its model, its evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.files import write_atomic
from flatrock.core.progress import Progress
from flatrock.core.records import Result, Run
from flatrock.core.registry import unknown
from flatrock.data.catalog import load_data
from flatrock.engine.checkpoint import load as load_checkpoint
from flatrock.engine.checkpoint import put_model
from flatrock.engine.folder import RunFolder
from flatrock.evaluation.checks import TEST_SELECTED
from flatrock.evaluation.evaluate import evaluate
from flatrock.models.classifier import Classifier
from flatrock.recipes.build import build_model, build_threat, limited, recipe_hash
from flatrock.recipes.check import validate
from flatrock.recipes.schema import Recipe

CHOICES = ("best", "last")


def find_checkpoint(source: Path | str | Run, which: str = "best") -> Path:
    """The weights file meant by a run, a run folder or a file; a FAILED run has none to offer."""
    path = source.folder if isinstance(source, Run) else Path(source)
    if path.is_file():
        return path
    if not path.is_dir():
        raise StateError(f"there is no run folder or checkpoint {path}")
    if which not in CHOICES:
        raise ConfigError(unknown("checkpoint", which, CHOICES))
    folder = RunFolder(path)
    info = folder.read_info()
    if info["status"] == "failed":
        raise StateError(f"run {path} FAILED ({info.get('reason')}); name a checkpoint file to look at it anyway")
    file = folder.best if which == "best" else folder.last
    if file.is_file():
        _check_identity(file, which, info["recipe_hash"])
        return file
    records = folder.records()
    if not records:
        raise StateError(f"{path} has no finished epoch yet; train on with --resume")
    if which == "best" and records[-1].best_epoch is None:
        raise StateError(f"{path} has no best epoch: every one predicted a single class; look at --which last")
    raise StateError(f"{file} is lost; look at the run's other checkpoints")


def _check_identity(file: Path, which: str, recipe_hash: str) -> None:
    """A file in a run folder must be what its name says, of this run."""
    _, meta = load_checkpoint(file, role=which)
    if meta["recipe_hash"] != recipe_hash:
        raise StateError(f"{file} belongs to another run; put the right file back or train again with --resume")


def load(source: Path | str | Run, *, which: str = "best", device: torch.device | str = "cpu") -> Classifier:
    """The trained model of a run folder (its best epoch, or `which='last'`) or of a checkpoint file, in eval mode."""
    return load_with_recipe(find_checkpoint(source, which), device=device)[0]


def load_with_recipe(path: Path, *, device: torch.device | str = "cpu") -> tuple[Classifier, Recipe, Mapping[str, Any]]:
    """Model, recipe and the rest of a checkpoint's meta."""
    tensors, meta = load_checkpoint(path)
    recipe = validate(meta["recipe"], f"the recipe stored in {path}")
    model = build_model(recipe)
    put_model(model, tensors, path)
    return model.to(device).eval(), recipe, meta


def evaluate_run(
    source: Path | str | Run,
    *,
    which: str = "best",
    attacks: Sequence[str | Mapping[str, Any]] | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Evaluate a trained model on its recipe's test set; writes result-<which>.json beside a run's checkpoints."""
    path = find_checkpoint(source, which)
    model, recipe, meta = load_with_recipe(path, device=device)
    test = limited(load_data(recipe.data.name, "test", folder=data_folder, **recipe.data.options), limit)
    chosen_on_test = recipe.select.data == "test" and path.stem != "last"
    result = evaluate(
        model,
        test.images(torch.arange(len(test))),
        test.y,
        build_threat(recipe),
        attacks=recipe.evaluate.attacks if attacks is None else attacks,
        device=device,
        batch_size=batch_size or recipe.evaluate.batch_size,
        seed=seed,
        progress=progress,
        marks=(TEST_SELECTED,) if chosen_on_test else (),
        provenance={
            "recipe": recipe.name,
            "recipe_hash": recipe_hash(recipe),
            "checkpoint": path.name,
            "epoch": meta.get("record", meta)["epoch"],
            "data": f"{test.name} test, {len(test)} samples",
            "train_seed": recipe.seed,
        },
    )
    write_atomic(path.with_name(f"result-{path.stem}.json"), result.to_json().encode())
    return result
