"""Train a recipe in one call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flatrock.core.device import Devices, pick_devices
from flatrock.core.errors import ConfigError, shown
from flatrock.core.numbers import plain
from flatrock.core.processes import terminable
from flatrock.core.progress import Progress
from flatrock.core.runs import Run
from flatrock.core.threat import L2, Linf
from flatrock.engine.loop import OnEpoch, train
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe, place_of
from flatrock.recipes.schema import Recipe
from flatrock.workflows.finished import as_trained, finished_before, tell_damaged
from flatrock.workflows.together import train_together


def train_recipe(
    recipe: Recipe | Run | str | Path,
    *,
    folder: str | Path | None = None,
    data_dir: str | Path | None = None,
    download: bool = False,
    device: Devices = "auto",
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_epoch: OnEpoch | None = None,
    **overrides: Any,
) -> Run:
    """Load, build and train; bad input raises before anything is written.

    With `resume` a run, or its folder, may stand for the recipe: it goes on where it is, as it began. One that has
    finished is returned as it is, also if its states were deleted; only what it is evaluated by may be another.
    Several devices share every batch, a process on each; a script that asks for that does so behind
    `if __name__ == "__main__":`, because those processes read it, too.
    """
    _check_torch()
    if on_epoch is not None and not callable(on_epoch):
        raise ConfigError(f"on_epoch must be a function of an epoch's record, got {shown(on_epoch)}")
    if isinstance(recipe, Recipe) and overrides:
        raise ConfigError(f"a loaded recipe takes no overrides, got {', '.join(overrides)}; give them to load_recipe")
    source = recipe.folder if isinstance(recipe, Run) else recipe
    chosen = source if isinstance(source, Recipe) else load_recipe(source, written(overrides), resume=resume)
    devices, place = pick_devices(device), place_of(source, folder, resume=resume)
    if resume and not overwrite:
        if (done := finished_before(chosen, place, progress)) is not None:
            tell_damaged(done, progress)
            return done
        chosen = as_trained(chosen, place, progress)
    how: dict[str, Any] = {
        "folder": place,
        "data_folder": None if data_dir is None else Path(data_dir),
        "download": download,
        "resume": resume,
        "progress": progress,
    }
    begin: dict[str, Any] = {"overwrite": overwrite, "on_epoch": on_epoch}
    with terminable():
        if len(devices) > 1:
            run = train_together(chosen, devices, **how, **begin)
        else:
            run = train(build_job(chosen, device=devices[0], **how), resume=resume, progress=progress, **begin)
    if resume:
        tell_damaged(run, progress)
    return run


def written(value: Any) -> Any:
    """A value as a recipe file would say it: numbers of Python's, lists, paths, and a threat by its norm and eps."""
    if isinstance(value, Linf | L2):
        return {"norm": value.norm, "eps": value.eps}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: written(inner) for key, inner in value.items()}
    return [written(inner) for inner in value] if isinstance(value, list | tuple) else plain(value)


def _check_torch() -> None:
    """torch is in no state that networks cannot be made and trained in."""
    if torch.is_inference_mode_enabled():
        raise ConfigError("training needs gradients, which torch.inference_mode() rules out; call it outside of that")
    if torch.get_default_dtype() != torch.float32:
        raise ConfigError(
            f"torch's default dtype is {torch.get_default_dtype()}, but training is in torch.float32; "
            "call torch.set_default_dtype(torch.float32) first"
        )
