"""What a run must remember to go on exactly where it stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import StateError, TrainingError
from flatrock.core.progress import Progress
from flatrock.core.runs import EpochRecord
from flatrock.core.tensorfile import load
from flatrock.engine.checkpoint import model_tensors, optimizer_tensors, put_model, put_optimizer
from flatrock.engine.folder import RunFolder, changed_paths
from flatrock.engine.job import Job
from flatrock.engine.own import state_of
from flatrock.engine.watch import Watch


@dataclass
class TrainState:
    """Progress of a run. Random numbers need no state: they are functions of the seed and the step.

    `start` is a digest of the weights it began with, None if they were drawn.
    """

    start: str | None = None
    epoch: int = 0
    step_in_epoch: int = 0
    seconds: float = 0.0
    watch: Watch = field(default_factory=Watch)
    history: list[EpochRecord] = field(default_factory=list)
    begun: float | None = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float | None:
        """Seconds the run has taken, those between a kill and resuming apart; None if its beginning was not timed."""
        return None if self.begun is None else time.monotonic() - self.begun


def check_finite(tensors: Mapping[str, Tensor], state: TrainState | None = None) -> None:
    """Refuse to store weights, statistics or momentum that are not finite; `state` knows how far training is."""
    fine = {name: torch.isfinite(tensor).all() for name, tensor in tensors.items()}
    on_gpu = [good for good in fine.values() if good.is_cuda]
    if on_gpu and bool(torch.stack(on_gpu).all()):  # one wait, not one for each
        fine = {name: good for name, good in fine.items() if not good.is_cuda}
    for name, good in fine.items():
        if not bool(good):
            raise TrainingError(f"{name} became non-finite{_when(state)}; lower optimizer.lr")


def _when(state: TrainState | None) -> str:
    """How far training is."""
    if state is None:
        return ""
    done = f"step {state.step_in_epoch} of epoch {state.epoch + 1}"
    return f" by {done if state.step_in_epoch else f'the end of epoch {state.epoch}'}"


def save_state(job: Job, folder: RunFolder, state: TrainState) -> None:
    """Write everything needed to resume; the copy before it is kept as a fall-back against damage."""
    state.watch.check()
    tensors, numbers = everything(job)
    check_finite(tensors, state)
    meta: dict[str, Any] = {
        "role": "state",
        "recipe": dict(job.recipe),
        "recipe_hash": job.recipe_hash,
        "data_digest": job.data_digest,
        "helper": None if job.helper is None else job.helper.digest,
        "start": state.start,
        "class_names": list(job.class_names),
        "epoch": state.epoch,
        "step_in_epoch": state.step_in_epoch,
        "seconds": state.seconds,
        "elapsed": state.elapsed,
        "watch": state.watch.state(),
        "optimizer": numbers,
        "history": [r.to_dict() for r in state.history],
    }
    folder.writer.save(folder.state, tensors, meta, older=folder.older_state)


def everything(job: Job) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain numbers that training changes: the live ones."""
    tensors, numbers = optimizer_tensors(job.optimizer)
    kept = {
        f"flatness/{name}/{k}": v for name, method in job.flatness.items() for k, v in state_of(name, method).items()
    }
    return {**model_tensors(job.model), **tensors, **kept}, numbers


def put(job: Job, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], path: Path) -> None:
    """Inverse of everything; `path` is where they come from."""
    put_model(job.model, tensors, path)
    put_optimizer(job.optimizer, tensors, numbers)
    for name, method in job.flatness.items():
        own = f"flatness/{name}/"
        method.restore({k.removeprefix(own): v for k, v in tensors.items() if k.startswith(own)})


def restore_state(job: Job, folder: RunFolder, progress: Progress) -> TrainState:
    """Load the newest intact state into the job's model and optimizer."""
    path, tensors, meta = _newest_intact(folder, progress)
    if meta["recipe_hash"] != job.recipe_hash:
        found = changed_paths(_told(job.recipe), _told(meta["recipe"]))
        raise StateError(
            f"{path} belongs to another recipe; differences:\n  " + "\n  ".join(found[:10]) + "\n"
            f"name the run alone to continue it as it began (`flatrock train {folder.path} --resume`), repeat the "
            "overrides it began with, or choose another --run-dir"
        )
    if meta["data_digest"] != job.data_digest:
        raise StateError(f"the data are not those {path} was trained on; give the same files, or --overwrite")
    _check_helper(job, path, meta.get("helper"))
    _check_start(job, path, meta.get("start"))
    put(job, tensors, meta["optimizer"], path)
    return TrainState(
        start=meta.get("start"),
        epoch=meta["epoch"],
        step_in_epoch=min(meta["step_in_epoch"], len(job.loader)),  # on more devices an epoch may have one step less
        seconds=meta["seconds"],
        watch=Watch.restored(meta["watch"], job.device),
        history=[EpochRecord.from_dict(r) for r in meta["history"]],
        begun=None if meta.get("elapsed") is None else time.monotonic() - meta["elapsed"],
    )


def _told(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Without what says something about a recipe and decides nothing."""
    return {key: value for key, value in recipe.items() if key not in ("about", "name")}


def _check_helper(job: Job, path: Path, there: str | None) -> None:
    """The helper is the one the run began with; its path may be another, the recipe's hash does not know it."""
    here = None if job.helper is None else job.helper.digest
    if here != there:
        raise StateError(
            f"{path} was trained with a helper of weights {there and there[:16]}, objective.helper "
            f"{job.recipe['objective'].get('helper')!r} has {here and here[:16]}; name the helper the run began with, "
            "or --overwrite"
        )


def _check_start(job: Job, path: Path, there: str | None) -> None:
    """Weights to begin with that are not needed any more may be gone, but others belong to another run."""
    here = job.start
    if here is not None and here != there:
        raise StateError(
            f"{path} began with weights {there and there[:16]}, model.weights {job.recipe['model'].get('weights')!r} "
            f"has {here[:16]}; name those it began with (if they are gone, a path where nothing is: the run has its "
            "own by now), or --overwrite"
        )


def _newest_intact(folder: RunFolder, progress: Progress) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """The state, or the copy before it if the state is damaged; a damaged one is set aside, not overwritten with."""
    problems = []
    for path in (folder.state, folder.older_state):
        try:
            tensors, meta = load(path, role="state")
        except StateError as error:
            problems.append(str(error))
            continue
        if problems:
            progress.say(f"{problems[0]}\nresuming from the older state {path}; the steps since then are run again")
            if folder.state.exists():
                folder.state.replace(folder.damaged_state)
        return path, tensors, meta
    raise StateError(f"{folder.path} cannot be resumed:\n  " + "\n  ".join(problems) + f"\n{folder.anew()}")
