"""What is said and kept of a run that fails."""

from __future__ import annotations

import traceback
from contextlib import suppress

import torch

from flatrock.core.errors import FlatrockError, TrainingError, in_words
from flatrock.core.files import write_atomic
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job


def failed(job: Job, folder: RunFolder, error: Exception) -> TrainingError:
    """Mark a run as failed in run.json; the error to raise, with words for people.

    Where an error that is not of ours came from is in failure.txt: it may be the user's network, or a fault here.
    """
    with suppress(Exception):  # the first error counts
        folder.writer.wait()
    batch = _batch_of(job, error)
    said = str(error)
    if batch is not None:
        said += f" (its samples: failed_batch in {folder.info})"
    if not isinstance(error, FlatrockError):
        cure = "; lower train.batch_size" if isinstance(error, torch.OutOfMemoryError) else ""
        said = f"{in_words(error)}{cure} (where: {folder.failure})"
    reason = f"{said}. {folder.kept()}"
    with suppress(OSError):  # a full disk is no reason to hide the first error either
        if not isinstance(error, FlatrockError):
            write_atomic(folder.failure, "".join(traceback.format_exception(error)).encode())
        folder.write_info(status="failed", reason=reason, failed_batch=batch)
    return TrainingError(reason)


def _batch_of(job: Job, error: Exception) -> list[int] | None:
    """The ids of the samples of the step an error names: one of them may be what is wrong."""
    if not isinstance(error, TrainingError) or error.step is None:
        return None
    epoch, start = divmod(error.step, len(job.loader))
    return [int(i) for i in next(job.loader.epoch(epoch, start_step=start)).ids]
