"""Steps of a run as every process takes them, and the whole life of one that follows: no records, nothing on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.rng import kept_global_rng, seed_layers
from flatrock.data.loader import Batch
from flatrock.engine.checkpoint import model_tensors
from flatrock.engine.job import Job
from flatrock.engine.state import TrainState, everything, put
from flatrock.engine.step import StepOutcome, train_step


def hand_out(job: Job, state: TrainState) -> None:
    """The leader tells the others where training goes on: weights, the optimizer's state, epoch and step."""
    if not job.team.alone:
        tensors, numbers = everything(job)
        there = {name: tensor.cpu() for name, tensor in tensors.items()}
        job.team.told((there, numbers, state.epoch, state.step_in_epoch))


def follow(job: Job) -> None:
    """Train along with the leader to the end of the run."""
    nothing: tuple[dict[str, Tensor], dict[str, Any], int, int] = ({}, {}, 0, 0)
    tensors, numbers, epoch, step_in_epoch = job.team.told(nothing)
    put(job, tensors, numbers, Path("what the first device sent"))
    state = TrainState(epoch=epoch, step_in_epoch=step_in_epoch)
    with kept_global_rng(job.device), torch.enable_grad():
        while not over(job, state):
            job.model.train()
            for batch in job.loader.epoch(state.epoch, state.step_in_epoch, job.team):
                state.watch.see(take_step(job, state, batch), state.epoch * len(job.loader) + state.step_in_epoch - 1)
                if spent(job, state):
                    break
            state.watch.check()
            check_together(job)
            state.epoch, state.step_in_epoch = state.epoch + 1, 0


def take_step(job: Job, state: TrainState, batch: Batch) -> StepOutcome:
    """The next step of an epoch; dropout and the like draw from the step, and differently in every process."""
    step = state.epoch * len(job.loader) + state.step_in_epoch
    where = (step,) if job.team.alone else (step, job.team.rank)
    seed_layers(job.seed.child("layers", *where), job.device)
    set_lr(job, step)
    with job.runner.clocked():
        outcome = train_step(job, batch, step=step, guard=state.step_in_epoch == 0)
    state.step_in_epoch += 1
    if state.step_in_epoch == 1:
        check_together(job)
    return outcome


def set_lr(job: Job, step: int) -> None:
    """The rate the schedule has for this step, for every group of parameters that follows it."""
    for group in job.optimizer.param_groups:
        if group.get("scheduled", True):
            group["lr"] = job.schedule.at(step, len(job.loader))


def over(job: Job, state: TrainState) -> bool:
    """Whether nothing is left to train."""
    return state.epoch >= job.epochs or spent(job, state)


def spent(job: Job, state: TrainState) -> bool:
    """Whether max_steps cut the run short."""
    done = state.epoch * len(job.loader) + state.step_in_epoch
    return job.max_steps is not None and done >= job.max_steps


def check_together(job: Job) -> None:
    """After the first and the last step of an epoch all processes have the same network."""
    job.team.check_alike({name: t for name, t in model_tensors(job.model).items() if t.is_floating_point()})
