"""One update: attack, loss, gradient, optimizer step, with the four places where a flatness method may act."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flatrock.core.borrow import nudged
from flatrock.core.hooks import Nudge, Scene, Shift
from flatrock.core.types import Point
from flatrock.data.augment import MIXING
from flatrock.data.loader import Batch
from flatrock.engine.craft import check, craft, merged
from flatrock.engine.job import Job
from flatrock.engine.loss import Stage, descend, objective_gradients
from flatrock.engine.own import nudge_of, shift_of
from flatrock.engine.parts import running_statistics


@dataclass(frozen=True)
class StepOutcome:
    """The loss and its terms of one batch, and how many of its labelled samples the (adversarial) pass got right."""

    losses: Mapping[str, Tensor]
    right: Tensor
    labelled: Tensor
    samples: int


def train_step(job: Job, batch: Batch, *, step: int, guard: bool) -> StepOutcome:
    """One update of the weights; `guard` also verifies ball and box of what the attack returned (it costs a sync)."""
    with job.runner.tuned():
        return _update(job, batch, step=step, guard=guard)


def _update(job: Job, batch: Batch, *, step: int, guard: bool) -> StepOutcome:
    x, y = mixed(job, batch, step)
    stage = Stage(job, x, y, batch.ids, job.moment(step), batch.share)
    job.optimizer.zero_grad(set_to_none=True)  # the attack may have their memory
    for part in job.runner.split(x) if guard else ():
        job.runner.check(part, job.bn_mode)
        if job.helper is not None:
            job.helper.check(part)
    points = _attacked(stage, {})
    if guard:
        check(stage, points)
    nudge = _nudge(stage, points)
    update = partial(descend, stage, nudge.points)
    with nudged(job.model, nudge.shift, keep_change=nudge.step_inside):
        done = update()
        if nudge.step_inside:
            _step(job, update)
    if not nudge.step_inside:
        _step(job, update)
    for method in job.flatness.values():
        method.after_step(job.model, stage.moment)
    if job.clean_tick:
        with torch.no_grad():
            job.runner.view(x)
            job.team.mean_(running_statistics(job.model), batch.share)
    judged = done.views.adv or done.views.clean
    assert judged is not None
    hard = y.argmax(1) if y.is_floating_point() else y
    right, labelled = (judged.logits.detach().argmax(1) == hard).sum(), (hard >= 0).sum()
    samples = round(len(batch.ids) / batch.share)
    return StepOutcome(done.losses, job.team.total(right), labelled=job.team.total(labelled), samples=samples)


def mixed(job: Job, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a batch as a step sees them: mixed with each other if the recipe says so."""
    alphas = {"mixup": job.mixup_alpha, "cutmix": job.cutmix_alpha}
    name = next((name for name, alpha in alphas.items() if alpha), None)  # recipes allow one of them
    if name is None:
        return batch.x, batch.y
    one_hot = F.one_hot(batch.y, job.num_classes).float()
    return MIXING[name](batch.x, one_hot, job.seed.child(name, step), alpha=alphas[name])


def _attacked(stage: Stage, shift: Shift) -> tuple[Point, ...]:
    """Inputs crafted at w + shift and the noise methods ask for, which is drawn anew, not kept: it is as large as w."""
    model = stage.job.model
    for name, method in stage.job.flatness.items():
        shift = merged(shift, shift_of(name, method, "before_attack", method.before_attack(model, stage.moment), model))
    return craft(stage, shift)


def _nudge(stage: Stage, points: tuple[Point, ...]) -> Nudge:
    """The weights the loss sees; recipes allow one method to move them."""
    scene = Scene(
        model=stage.job.model,
        moment=stage.moment,
        points=points,
        gradients=partial(objective_gradients, stage),
        craft=partial(_attacked, stage),
    )
    for name, method in stage.job.flatness.items():
        nudge = nudge_of(name, method, method.before_loss(scene), scene)
        if nudge is not None:
            return nudge
    return Nudge({}, points)


def _step(job: Job, update: Callable[[], object]) -> None:
    """Step on the gradients there are; an optimizer with a loop of its own may ask for new ones."""
    if getattr(job.optimizer, "inner_loops", 1) > 1:
        job.optimizer.step(update)  # type: ignore[arg-type]
    else:
        job.optimizer.step()
