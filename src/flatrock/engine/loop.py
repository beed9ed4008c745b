"""The training loop: a Job in, epoch records on disk, a Run out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flatrock.core.errors import StateError, TrainingError
from flatrock.core.neighbours import Lookout
from flatrock.core.progress import Progress, Silent
from flatrock.core.rng import kept_global_rng
from flatrock.core.runs import EpochRecord, Run, best_record
from flatrock.engine.average import averaged
from flatrock.engine.checkpoint import model_tensors
from flatrock.engine.events import EventLog
from flatrock.engine.failure import failing, stopping
from flatrock.engine.folder import RunFolder
from flatrock.engine.follow import check_together, hand_out, over, spent, take_step
from flatrock.engine.job import Job, ProbeOutcome
from flatrock.engine.memory import note_memory, probed
from flatrock.engine.state import TrainState, check_finite, restore_state, save_state
from flatrock.engine.told import tell_anew, tell_findings, tell_resumed
from flatrock.engine.verdict import coded, doubts
from flatrock.engine.watch import Watch
from flatrock.engine.writer import Writer

# Told the record of every epoch once it is stored.
OnEpoch = Callable[[EpochRecord], object]


def train(
    job: Job,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_epoch: OnEpoch | None = None,
) -> Run:
    """Train to the end of the recipe; a killed run continues bit-identically with resume=True (on the CPU).

    What `on_epoch` raises interrupts the run, as Ctrl-C does.
    """
    listener = progress or Silent()
    writer = Writer(beside=job.device.type == "cuda", say=listener.say)
    folder = RunFolder(job.folder, writer)
    if resume and overwrite:
        raise StateError("--resume and --overwrite exclude each other; choose one")
    if resume and not folder.in_use():
        tell_anew(folder, listener)
        resume = False
    if resume:
        folder.check_resumable()
    else:
        folder.claim(overwrite=overwrite)
    with folder.locked(), writer, torch.enable_grad():  # whoever calls may have switched gradients off
        return _train(job, folder, resume=resume, progress=listener, on_epoch=on_epoch)


def _train(job: Job, folder: RunFolder, *, resume: bool, progress: Progress, on_epoch: OnEpoch | None) -> Run:
    with stopping(folder):
        state = _resumed(job, folder, progress) if resume else _fresh(job, folder)
        tell_findings(folder, progress, job.notes)
        hand_out(job, state)
        folder.write_recipe(_recipe_text(job))
        folder.rewrite(state.history)
        whole = job.epochs * len(job.loader)
        total = min(whole, job.max_steps or whole)
        _run(job, folder, state, total, progress, on_epoch)
        if total == whole and state.history[-1].collapsed:
            with failing(job, folder):
                raise TrainingError("the run collapsed: the model predicts one class for every selection sample")
        found = doubts(state.history, metric=job.select_metric, samples=job.selected_from, classes=job.num_classes)
        tell_findings(folder, progress, coded(found, "diagnostics"))
        status = "finished" if total == whole else "truncated"
        folder.write_info(status=status, reason="", epochs_done=len(state.history))
    return folder.run()


def _run(
    job: Job, folder: RunFolder, state: TrainState, total: int, progress: Progress, on_epoch: OnEpoch | None
) -> None:
    """All epochs that are left."""
    events = EventLog(folder.tensorboard, history=state.history, wanted=job.tensorboard, progress=progress)
    progress.begin(f"training {job.name}", total, state.epoch * len(job.loader) + state.step_in_epoch)
    try:
        with kept_global_rng(job.device), _lookout(job) as lookout:
            while not over(job, state):
                with failing(job, folder):
                    _run_epoch(job, folder, state, progress)
                    note_memory(job, folder)
                    _end_epoch(job, folder, state, events, lookout)
                if on_epoch is not None:
                    folder.writer.wait()  # what it is told is on the disk, whatever it does
                    on_epoch(state.history[-1])
        with failing(job, folder):
            folder.writer.wait()
    finally:
        progress.end()
        events.close()


def _lookout(job: Job) -> Lookout:
    """For others on the GPU. Whoever began several processes that train is none: it may have used it before."""
    return Lookout(job.device, root=None if job.team.alone else os.getppid())


def _fresh(job: Job, folder: RunFolder) -> TrainState:
    folder.clear()
    state = TrainState(start=job.start)
    folder.write_info(status="running", reason="", **_certificate(job), provenance=dict(job.provenance))
    save_state(job, folder, state)
    folder.writer.wait()  # a folder nothing can be stored in is found out before anything is trained
    return state


def _certificate(job: Job) -> dict[str, Any]:
    return {"name": job.name, "recipe_hash": job.recipe_hash, "averages": job.averaging is not None}


def _resumed(job: Job, folder: RunFolder, progress: Progress) -> TrainState:
    state = restore_state(job, folder, progress)
    if state.history and state.step_in_epoch == 0:
        record = state.history[-1]
        folder.writer.save(folder.last, model_tensors(job.model), _weights_meta(job, "last", record))
        if job.averaging is not None and record.robust is not None:
            with kept_global_rng(job.device), averaged(job, job.averaging, step=record.step - 1) as model:
                folder.writer.save(
                    folder.average_last, model_tensors(model), _weights_meta(job, "average-last", record)
                )
    if over(job, state):
        progress.say(f"{folder.path}: there is nothing left to train")
    else:
        tell_resumed(job, folder, progress)
    folder.failure.unlink(missing_ok=True)
    folder.write_info(
        status="running", reason="", failed_batch=None, **_certificate(job), **_origins(job, folder, state)
    )
    return state


def _origins(job: Job, folder: RunFolder, state: TrainState) -> dict[str, Any]:
    """For run.json, where the run was resumed: not there, if nothing is left to train.

    Unless that file was lost and says nothing of where the epochs come from.
    """
    known = folder.resumptions()
    nowhere = over(job, state) and folder.provenance()
    return {"resumed": (known if nowhere else [*known, dict(job.provenance)]) or None}


def _recipe_text(job: Job) -> str:
    import yaml

    return yaml.safe_dump(dict(job.recipe), sort_keys=False)


def _run_epoch(job: Job, folder: RunFolder, state: TrainState, progress: Progress) -> None:
    """The rest of the current epoch, step by step, saving the state every `save_seconds`."""
    job.model.train()
    begun = saved = time.monotonic()
    earlier = state.seconds
    note = _note(job, state)
    first = state.epoch * len(job.loader)
    for batch in job.loader.epoch(state.epoch, state.step_in_epoch, job.team):
        if job.runner.must_compile:
            progress.advance(0, "compiling the network, once")
        outcome = take_step(job, state, batch)
        state.watch.see(outcome, first + state.step_in_epoch - 1)
        state.seconds = earlier + time.monotonic() - begun
        progress.advance(1, f"{note}{job.runner.told}")
        if spent(job, state):
            break
        if time.monotonic() - saved > job.save_seconds:
            folder.writer.wait()
            save_state(job, folder, state)
            saved = time.monotonic()
    tell_findings(folder, progress, coded(job.findings, "speed"))
    state.watch.check()  # waits for a GPU, so the seconds below include every step
    check_together(job)
    state.seconds = earlier + time.monotonic() - begun


def _note(job: Job, state: TrainState) -> str:
    text = f"epoch {state.epoch + 1}/{job.epochs}"
    probed = [r for r in state.history if r.robust is not None]
    if probed:
        found = probed[-1]
        text += f"  clean {100 * (found.clean or 0):.1f}  robust {100 * (found.robust or 0):.1f}"
        if found.average_clean is not None and found.average_robust is not None:
            text += f"  averaged {100 * found.average_clean:.1f}  {100 * found.average_robust:.1f}"
    return text


def _end_epoch(job: Job, folder: RunFolder, state: TrainState, events: EventLog, lookout: Lookout) -> None:
    """Probe, record and store a finished epoch."""
    check_finite(model_tensors(job.model), state)
    folder.writer.wait()  # for the epoch before: a run that is killed has lost one, not two
    epoch = state.epoch + 1
    final = epoch == job.epochs or spent(job, state)
    outcome = probed(job, job.model) if final or epoch % job.probe_every == 0 else None
    record = _record(job, state, outcome)
    if job.averaging is not None:
        record = _end_average(job, folder, state, record)
    record = replace(record, elapsed=state.elapsed, neighbours=lookout.seen())
    state.history.append(record)
    state.epoch, state.step_in_epoch, state.seconds, state.watch = epoch, 0, 0.0, Watch()
    _store(job, folder, state, record)
    events.write(record)


def _end_average(job: Job, folder: RunFolder, state: TrainState, record: EpochRecord) -> EpochRecord:
    """Probe and store the averaged weights of a probed epoch; the record tells how they did.

    Not of every epoch: statistics that are estimated anew cost attacks.
    """
    assert job.averaging is not None
    best = best_record(state.history, "average_best_epoch")
    if record.robust is None:
        return replace(record, average_best_epoch=best.epoch if best else None)
    with averaged(job, job.averaging, step=record.step - 1) as model:
        tensors = {name: tensor.clone() for name, tensor in model_tensors(model).items()}
        outcome = probed(job, model)
    check_finite(tensors, state)
    improved = _better(job, outcome, None if best is None else (best.average_clean, best.average_robust))
    record = replace(
        record,
        average_clean=outcome.clean,
        average_robust=outcome.robust,
        average_best_epoch=record.epoch if improved else (best.epoch if best else None),
    )
    if improved:
        folder.writer.save(folder.average_best, tensors, _weights_meta(job, "average-best", record))
    folder.writer.save(folder.average_last, tensors, _weights_meta(job, "average-last", record))
    return record


def _better(job: Job, new: ProbeOutcome, best: tuple[float | None, float | None] | None) -> bool:
    """Whether these weights beat the best (clean, robust) so far; a one-class model never does: it is wrong, yet not
    attackable."""
    if new.collapsed:
        return False
    if best is None:
        return True
    by = (0, 1) if job.select_metric == "clean" else (1, 0)
    return [(new.clean, new.robust)[i] for i in by] > [best[i] or 0.0 for i in by]


def _record(job: Job, state: TrainState, outcome: ProbeOutcome | None) -> EpochRecord:
    epoch, best = state.epoch + 1, best_record(state.history, "best_epoch")
    improved = outcome is not None and _better(job, outcome, None if best is None else (best.clean, best.robust))
    return EpochRecord(
        epoch=epoch,
        step=state.epoch * len(job.loader) + state.step_in_epoch,
        lr=job.schedule.at(state.epoch * len(job.loader) + state.step_in_epoch - 1, len(job.loader)),
        terms=state.watch.means(),
        running_accuracy=state.watch.accuracy(),
        clean=outcome.clean if outcome else None,
        robust=outcome.robust if outcome else None,
        train_robust=outcome.train_robust if outcome else None,
        selected_on=job.selected_on,
        best_epoch=epoch if improved else (best.epoch if best else None),
        seconds=state.seconds,
        images_per_second=state.watch.samples / max(state.seconds, 1e-9),
        collapsed=outcome is not None and outcome.collapsed,
    )


def _store(job: Job, folder: RunFolder, state: TrainState, record: EpochRecord) -> None:
    """Weights first, then the state that makes them count, then the line people read."""
    tensors = model_tensors(job.model)
    if record.best_epoch == record.epoch:
        folder.writer.save(folder.best, tensors, _weights_meta(job, "best", record))
    if job.keep.wants(record.epoch):
        folder.writer.save(folder.epoch(record.epoch), tensors, _weights_meta(job, "epoch", record))
    folder.writer.save(folder.last, tensors, _weights_meta(job, "last", record))
    save_state(job, folder, state)
    folder.writer.do(partial(folder.append, record, folder.owner()))


def _weights_meta(job: Job, role: str, record: EpochRecord) -> dict[str, Any]:
    return {
        "role": role,
        "recipe": dict(job.recipe),
        "recipe_hash": job.recipe_hash,
        "class_names": list(job.class_names),
        "record": record.to_dict(),
    }
