"""What is said and kept of a run that fails."""

from __future__ import annotations

import traceback
from contextlib import suppress
from pathlib import Path

import torch

from flatrock.core.errors import FlatrockError, TrainingError, in_words
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job

# Code that is not the user's.
_OURS = (Path(__file__).parents[1], Path(torch.__file__).parent)


def failed(job: Job, folder: RunFolder, error: Exception) -> TrainingError:
    """Mark a run as failed in run.json; the error to raise, with words for people."""
    with suppress(Exception):  # the first error counts
        folder.writer.wait()
    batch = _batch_of(job, error)
    where = "" if batch is None else f" (its samples: failed_batch in {folder.info})"
    said = str(error) if isinstance(error, FlatrockError) else f"{in_words(error)}{_place(error)}"
    reason = f"{said}{where}. {folder.kept()}"
    folder.write_info(status="failed", reason=reason, failed_batch=batch)
    return TrainingError(reason)


def _batch_of(job: Job, error: Exception) -> list[int] | None:
    """The ids of the samples of the step an error names: one of them may be what is wrong."""
    step = getattr(error, "step", None)
    if step is None or not isinstance(error, TrainingError):
        return None
    epoch, start = divmod(step, len(job.loader))
    return [int(i) for i in next(job.loader.epoch(epoch, start_step=start)).ids]


def _place(error: Exception) -> str:
    """The line of the user's code an error came through last, if it did: that of the network, most likely."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not any(Path(f.filename).is_relative_to(folder) for folder in _OURS)]
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
