"""One update: attack, passes, loss, gradient, optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.attacks.craft import check_crafted
from flatrock.core.borrow import frozen, kept_buffers, mode
from flatrock.core.types import Parts, View, Views
from flatrock.data.augment import mixup
from flatrock.data.loader import Batch
from flatrock.engine.job import Job
from flatrock.models.view import view


@dataclass(frozen=True)
class StepOutcome:
    """The loss of one batch, and how many of its labelled samples the (adversarial) pass got right."""

    parts: Parts
    right: Tensor
    labelled: Tensor
    samples: int


def train_step(job: Job, batch: Batch, *, step: int, guard: bool) -> StepOutcome:
    """One update of the weights; `guard` also verifies ball and box of what the attack returned (it costs a sync)."""
    x, y = _mixed(job, batch, step)
    x_adv = _attacked(job, x, y, batch, step)
    if guard and x_adv is not x:
        check_crafted(x_adv, x, job.threat, job.attack)
    views = run_passes(job.model, job.objective.passes, x, x_adv)
    parts = _with_penalties(job, job.objective.loss(views, y))
    job.optimizer.zero_grad(set_to_none=True)
    parts.total.backward()  # type: ignore[no-untyped-call]
    job.optimizer.step()
    judged = views.adv or views.clean
    assert judged is not None
    hard = y.argmax(1) if y.is_floating_point() else y
    right = (judged.logits.detach().argmax(1) == hard).sum()
    return StepOutcome(parts, right, labelled=(hard >= 0).sum(), samples=len(batch.ids))


def run_passes(model: nn.Module, passes: tuple[str, ...], x: Tensor, x_adv: Tensor) -> Views:
    """Run the named passes in order; a repeated one is run without gradient, for BatchNorm's sake only."""
    seen: dict[str, View] = {}
    for name in passes:
        where = x if name == "clean" else x_adv
        if name in seen:
            with torch.no_grad():
                model(where)
        else:
            seen[name] = view(model, where)
    return Views(seen.get("clean"), seen.get("adv"))


def _mixed(job: Job, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
    if job.mixup_alpha == 0:
        return batch.x, batch.y
    one_hot = F.one_hot(batch.y, job.num_classes).float()
    return mixup(batch.x, one_hot, job.seed.child("mixup", step), alpha=job.mixup_alpha)


def _attacked(job: Job, x: Tensor, y: Tensor, batch: Batch, step: int) -> Tensor:
    """Adversarial inputs for this batch, crafted in the BatchNorm mode the recipe names; x itself without attack."""
    if job.attack is None:
        return x
    gen = job.seed.child("attack", step).samples(batch.ids)
    with _attack_mode(job.model, job.bn_mode), frozen(job.model):
        return job.attack(job.model, x, y, job.threat, gen).detach()


@contextmanager
def _attack_mode(model: nn.Module, bn_mode: str) -> Iterator[None]:
    """eval: running statistics; train: batch statistics, which tick; frozen: batch statistics, given back."""
    with mode(model, training=bn_mode != "eval"):
        if bn_mode == "frozen":
            with kept_buffers(model):
                yield
        else:
            yield


def decayed(model: nn.Module) -> list[nn.Parameter]:
    """The weights penalties act on: all parameters but biases and normalisation layers' (1-D tensors)."""
    return [p for p in model.parameters() if p.dim() > 1]


def _with_penalties(job: Job, parts: Parts) -> Parts:
    """Add l1 * sum|w| and l2/2 * sum w^2 where the recipe asks for them."""
    total, terms = parts.total, dict(parts.terms)
    if job.l1:
        terms["l1"] = job.l1 * torch.stack([p.abs().sum() for p in decayed(job.model)]).sum()
        total = total + terms["l1"]
    if job.l2:
        terms["l2"] = job.l2 / 2 * torch.stack([p.square().sum() for p in decayed(job.model)]).sum()
        total = total + terms["l2"]
    return Parts(total, terms)
