"""What is said and kept of a run that fails."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from flatrock.core.device import memory_is_short
from flatrock.core.errors import FlatrockError, StateError, TrainingError, in_words
from flatrock.core.files import write_atomic
from flatrock.core.guests import raised_at
from flatrock.core.processes import Terminated
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job


@contextmanager
def failing(job: Job, folder: RunFolder) -> Iterator[None]:
    """An error inside is one of the training, and fails the run; those of the disk or of who listens do not."""
    try:
        yield
    except (StateError, BrokenPipeError):
        raise
    except Exception as error:  # some show only once the network runs, which may be of the user's code
        raise failed(job, folder, error) from error


@contextmanager
def stopping(folder: RunFolder) -> Iterator[None]:
    """Whatever ends a run inside that can go on is noted in run.json: interrupted, and by what."""
    try:
        yield
    except BaseException as error:
        interrupted(folder, error)
        raise


def interrupted(folder: RunFolder, error: BaseException) -> None:
    """Note that a run which is running was stopped by this; what has ended otherwise is left as it is."""
    if isinstance(error, Exception):
        why = in_short(error)
    else:
        why = {KeyboardInterrupt: "Ctrl-C", Terminated: "SIGTERM"}.get(type(error), type(error).__name__)
    with suppress(FlatrockError, OSError):  # a full disk hides nothing: who is not running holds no lock
        if folder.read_info()["status"] == "running":
            folder.write_info(status="interrupted", reason=why)


def failed(job: Job, folder: RunFolder, error: Exception) -> TrainingError:
    """Mark a run as failed in run.json; the error to raise, with words for people.

    Where an error that is not of ours came from is in failure.txt: it may be the user's network, or a fault here.
    """
    with suppress(Exception):  # the first error counts
        folder.writer.wait()
    batch = _batch_of(job, error)
    if batch is not None:
        return marked(folder, f"{error} (its samples: failed_batch in {folder.info})", batch=batch)
    return marked(folder, in_short(error) + _of_memory(job, error), trace=trace_of(error))


def in_short(error: Exception) -> str:
    """What is said of an error, ours or not."""
    if isinstance(error, FlatrockError):
        return str(error)
    return in_words(error) + raised_at(error) + ("; lower train.batch_size" if memory_is_short(error) else "")


def _of_memory(job: Job, error: Exception) -> str:
    """Behind the cure for too little memory: what the batch size is, and who else could take some of it."""
    if not memory_is_short(error):
        return ""
    gpus = torch.cuda.device_count() if job.device.type == "cuda" and job.team.alone else 1
    share = f", or share batches among {gpus} GPUs with --device all" if gpus > 1 else ""
    return f" from {job.recipe['train']['batch_size']}, or say train.micro_batch, for parts that fit{share}"


def trace_of(error: Exception) -> str:
    """Where an error that is not of ours came from."""
    return "" if isinstance(error, FlatrockError) else "".join(traceback.format_exception(error))


def marked(folder: RunFolder, said: str, *, trace: str = "", batch: list[int] | None = None) -> TrainingError:
    """Write into the run folder that a run has failed; the error to raise."""
    reason = f"{said}{f' (where: {folder.failure})' if trace else ''}. {folder.kept()}"
    with suppress(OSError):  # a full disk is no reason to hide the first error either
        if trace:
            write_atomic(folder.failure, trace.encode())
        folder.write_info(status="failed", reason=reason, failed_batch=batch)
    return TrainingError(reason)


def _batch_of(job: Job, error: Exception) -> list[int] | None:
    """The ids of the samples of the step an error names: one of them may be what is wrong."""
    if not isinstance(error, TrainingError) or error.step is None:
        return None
    epoch, start = divmod(error.step, len(job.loader))
    return [int(i) for i in next(job.loader.epoch(epoch, start_step=start)).ids]
