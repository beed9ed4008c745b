"""The averaged model beside the raw one: the same network with averaged weights inside, given back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatrock.core.borrow import kept_buffers, mode
from flatrock.core.hooks import Flatness
from flatrock.core.rng import kept_global_rng
from flatrock.core.types import Point
from flatrock.engine.craft import craft
from flatrock.engine.job import Job
from flatrock.engine.loss import Stage, run_passes
from flatrock.engine.own import shift_of
from flatrock.engine.runner import Runner
from flatrock.engine.step import mixed


@contextmanager
def averaged(job: Job, method: Flatness, *, step: int) -> Iterator[nn.Module]:
    """The job's model with averaged parameters; BatchNorm keeps the live statistics or gets re-estimated ones.

    Statistics belong to weights: those of the live weights fit an average only as far as it is near to them.
    """
    parameters = dict(job.model.named_parameters())
    saved = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        with torch.no_grad():  # before the mode changes: layers may change their weights with it (LoRA)
            average = shift_of(type(method).__name__, method, "average", method.average(), job.model)
            for name, value in average.items():
                parameters[name].copy_(value)
        with kept_buffers(job.model), mode(job.model, training=False):
            if method.bn_batches:
                # Layers that draw (dropout) start from the step: a run that is resumed comes here from elsewhere.
                with kept_global_rng(job.device, seed=job.seed.child("layers", "average", step)):
                    _reestimate(job, method.bn_batches, step)
            yield job.model
    finally:
        with torch.no_grad():
            for name, value in saved.items():
                parameters[name].copy_(value)


def _reestimate(job: Job, batches: int, step: int) -> None:
    """BatchNorm statistics as plain means over training batches, mixed up as they were, in the passes the loss makes.

    The inputs are attacked first, while the model still has statistics to be attacked with.
    """
    norms = [m for m in job.model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return
    inputs: list[tuple[Tensor, Point]] = []
    epoch = step // len(job.loader)
    for i, batch in enumerate(islice(job.loader.epoch(epoch, 0, job.team), batches)):  # as many rows as steps have here
        x, y = mixed(job, batch, epoch * len(job.loader) + i)
        stage = Stage(job, x, y, batch.ids, job.moment(step))
        inputs.append((x, craft(stage, {})[-1]))
    momenta = [m.momentum for m in norms]
    runner = Runner(job.model, most=job.runner.most)  # statistics in full precision, by the network as it is now
    try:
        for m in norms:
            m.reset_running_stats()
            m.momentum = None  # torch's spelling of a plain mean over all batches
        with torch.no_grad(), mode(job.model, training=True):
            for x, point in inputs:
                run_passes(runner, job.passes, x, [point])
    finally:
        for m, momentum in zip(norms, momenta, strict=True):
            m.momentum = momentum
