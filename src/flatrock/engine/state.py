"""What a run must remember to go on exactly where it stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from flatrock.core.errors import StateError, TrainingError
from flatrock.core.progress import Progress
from flatrock.core.records import EpochRecord
from flatrock.engine.checkpoint import (
    load,
    model_tensors,
    optimizer_tensors,
    put_model,
    put_optimizer,
    save,
)
from flatrock.engine.folder import RunFolder, differences
from flatrock.engine.job import Job
from flatrock.engine.watch import Watch


@dataclass
class TrainState:
    """Progress of a run. Random numbers need no state: they are functions of the seed and the step."""

    epoch: int = 0
    step_in_epoch: int = 0
    seconds: float = 0.0
    watch: Watch = field(default_factory=Watch)
    history: list[EpochRecord] = field(default_factory=list)

    @property
    def best(self) -> EpochRecord | None:
        """The best probed epoch so far."""
        wanted = self.history[-1].best_epoch if self.history else None
        return next((r for r in self.history if r.epoch == wanted), None)


def check_weights(job: Job) -> None:
    """Refuse to store weights that are not finite."""
    for name, p in job.model.named_parameters():
        if not bool(torch.isfinite(p).all()):
            raise TrainingError(
                f"weights of {name} became non-finite; lower optimizer.lr. The last good checkpoint is kept"
            )


def save_state(job: Job, folder: RunFolder, state: TrainState) -> None:
    """Write everything needed to resume; the copy before it is kept as a fall-back against damage."""
    state.watch.check()
    check_weights(job)
    tensors, numbers = optimizer_tensors(job.optimizer)
    meta: dict[str, Any] = {
        "recipe": dict(job.recipe),
        "recipe_hash": job.recipe_hash,
        "epoch": state.epoch,
        "step_in_epoch": state.step_in_epoch,
        "seconds": state.seconds,
        "watch": state.watch.state(),
        "optimizer": numbers,
        "history": [r.to_dict() for r in state.history],
    }
    if folder.state.exists():
        folder.state.replace(folder.older_state)
    save(folder.state, {**model_tensors(job.model), **tensors}, meta)


def restore_state(job: Job, folder: RunFolder, progress: Progress) -> TrainState:
    """Load the newest intact state into the job's model and optimizer."""
    problems = []
    for path in (folder.state, folder.older_state):
        try:
            tensors, meta = load(path)
        except StateError as error:
            problems.append(str(error))
            continue
        if problems:
            progress.say(f"{problems[0]}\nresuming from the older state {path}; the steps since then are run again")
        if meta["recipe_hash"] != job.recipe_hash:
            found = differences(dict(job.recipe), meta["recipe"])
            raise StateError(f"{path} belongs to another recipe; differences:\n  " + "\n  ".join(found[:10]))
        put_model(job.model, tensors, path)
        put_optimizer(job.optimizer, tensors, meta["optimizer"])
        return TrainState(
            epoch=meta["epoch"],
            step_in_epoch=meta["step_in_epoch"],
            seconds=meta["seconds"],
            watch=Watch.restored(meta["watch"], job.device),
            history=[EpochRecord.from_dict(r) for r in meta["history"]],
        )
    raise StateError(f"{folder.path} cannot be resumed:\n  " + "\n  ".join(problems) + "\nstart again with --overwrite")
