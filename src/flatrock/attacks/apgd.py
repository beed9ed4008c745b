"""Auto-PGD (Croce & Hein 2020): gradient ascent with momentum whose step size adapts itself, row by row."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flatrock.attacks.pgd import Aim, classified_right, move, safely_broken
from flatrock.core.rng import SampleGen
from flatrock.core.threat import TINY, Linf, Threat
from flatrock.core.threat import rows as per_row

MOMENTUM = 0.75  # share of the new step; the rest is the step before
RHO = 0.75  # at least this share of the steps between two checkpoints must raise the loss
# Early stop asks the device which rows are done after the start, after the first steps (where most rows that break
# do), and then only every few steps: each question makes a GPU wait.
FIRST_LOOKS, LOOK_EVERY = 2, 5


@dataclass(frozen=True)
class Climb:
    """What each row came to: its point, the logits there, and the damage (0 still right, 1 wrong, 2 safely broken)."""

    x_adv: Tensor
    logits: Tensor
    damage: Tensor


def damage(logits: Tensor, y: Tensor) -> Tensor:
    """0 still right, 1 wrong, 2 wrong by more than rounding can undo."""
    return (~classified_right(logits, y)).int() + safely_broken(logits, y).int()


def checkpoints(steps: int) -> dict[int, int]:
    """{number of steps done: steps since the checkpoint before}, the moments at which step sizes are judged.

    The first interval is int(0.22 * steps), each next one int(0.03 * steps) shorter, none below int(0.06 * steps);
    every one of the three is at least 1. 100 steps: after 22, 41, 57, 70, 80, 87, 93, 99.
    """
    length, shorter, least = (max(int(share * steps), 1) for share in (0.22, 0.03, 0.06))
    found, at = {}, length
    while at <= steps:
        found[at] = length
        length = max(length - shorter, least)
        at += length
    return found


def sphere_start(x: Tensor, threat: Threat, gen: SampleGen) -> Tensor:
    """x + eps * u / ||u|| clipped to the box: u uniform in [-1, 1] for Linf (one coordinate is at eps), else normal."""
    u = 2 * gen.uniform(x) - 1 if threat.norm == Linf.norm else gen.normal(x)
    return (x + threat.eps * u / per_row(threat.size(u).clamp_min(TINY), u)).clamp(0, 1)


def apgd(
    aim: Aim,
    x: Tensor,
    threat: Threat,
    *,
    steps: int,
    start: Tensor,
    group: Tensor | None = None,
    early_stop: bool = False,
    eot: int = 1,
) -> Climb:
    """Climb from `start` with steps of size 2*eps that halve, row by row, when a checkpoint finds no progress.

    u = P(x' + step * ascent(g)), x'' = P(x' + 0.75 * (u - x') + 0.25 * (x' - x'_before)); the first x'' is u itself.
    At a checkpoint a row halves its step and returns to its best point if too few steps raised its loss, or if the
    checkpoint before left its step alone and its best loss has not risen since.

    A row that was misclassified on its way returns the last such point (one that is safely broken rather than one
    wrong by a hair), any other row the point of the largest loss: the strongest, where the official code gives up and
    returns x. With early_stop a safely broken row keeps the point that broke it and leaves the batch soon after, and
    with it every row of its `group` (one number per row). steps + 1 forward and backward passes; with eot > 1 each
    stands for that many, and gradient, loss and logits are their means (the official code averages the gradient alone
    and trusts the last draw with the rest).
    """
    rows = _begin(aim, x, threat, start, group, eot)
    done = Climb(rows.kept.clone(), rows.logits.clone(), rows.damage.clone())
    checks = checkpoints(steps)
    for i in range(steps):
        if early_stop and (i <= FIRST_LOOKS or i % LOOK_EVERY == 0):
            aim, rows = _without_broken(aim, rows, done)
            if rows.index.numel() == 0:
                return done
        _step(rows, threat, share=MOMENTUM if i else 1.0)
        _learn(rows, aim, eot, keep_first=early_stop)
        if i + 1 in checks:
            _check(rows, checks[i + 1])
    _write(rows, done)
    return done


@dataclass
class _Rows:
    """All that a row carries from step to step; every tensor has one row per row."""

    index: Tensor  # in the caller's batch
    group: Tensor
    x: Tensor
    x_adv: Tensor
    x_before: Tensor
    grad: Tensor
    step: Tensor
    x_best: Tensor
    grad_best: Tensor
    loss_best: Tensor
    loss_last: Tensor
    loss_checked: Tensor  # loss_best at the last checkpoint
    rises: Tensor  # steps since then that raised the loss
    reduced: Tensor  # whether the last checkpoint halved the step
    kept: Tensor  # what the row would return now
    logits: Tensor  # those of kept
    damage: Tensor

    def __getitem__(self, keep: Tensor) -> _Rows:
        return _Rows(**{f.name: getattr(self, f.name)[keep] for f in fields(self)})


def _begin(aim: Aim, x: Tensor, threat: Threat, start: Tensor, group: Tensor | None, eot: int) -> _Rows:
    grad, logits, loss = _look(aim, start, eot)
    index = torch.arange(x.shape[0], device=x.device)
    return _Rows(
        index=index,
        group=index if group is None else group,
        x=x,
        x_adv=start,
        x_before=start,
        grad=grad,
        step=x.new_full(loss.shape, 2 * threat.eps),  # the type of inputs: logits may have another
        x_best=start,
        grad_best=grad,
        loss_best=loss,
        # The official code compares the first step with 0, not with the loss at the start; for losses that are
        # negative while a sample is right (dlr, margin) that decides step sizes, so it is done here too.
        loss_last=torch.zeros_like(loss),
        loss_checked=loss,
        rises=torch.zeros_like(loss),
        reduced=torch.ones_like(loss, dtype=torch.bool),
        kept=start,
        logits=logits,
        damage=damage(logits, aim.y),
    )


def _look(aim: Aim, x: Tensor, eot: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, logits and loss at x, each the mean of `eot` draws; where there is no gradient (NaN) it is 0."""
    grad, logits = aim.gradient(x)
    loss = aim.loss(logits, aim.target)
    for _ in range(eot - 1):
        again, answer = aim.gradient(x)
        grad, logits, loss = grad + again, logits + answer, loss + aim.loss(answer, aim.target)
    if eot > 1:
        grad, logits, loss = grad / eot, logits / eot, loss / eot
    return torch.nan_to_num(grad), logits, loss


def _step(rows: _Rows, threat: Threat, *, share: float) -> None:
    aimed = move(rows.x, rows.x_adv, per_row(rows.step, rows.x) * threat.ascent(rows.grad), threat)
    mixed = share * (aimed - rows.x_adv) + (1 - share) * (rows.x_adv - rows.x_before)
    rows.x_before, rows.x_adv = rows.x_adv, move(rows.x, rows.x_adv, mixed, threat)


def _learn(rows: _Rows, aim: Aim, eot: int, *, keep_first: bool) -> None:
    """Look at the new point and take down what it is worth; no row waits for another, nor the host for the device."""
    rows.grad, logits, loss = _look(aim, rows.x_adv, eot)
    now = damage(logits, aim.y)
    rises = loss > rows.loss_best
    hit = (now > 0) & (now >= rows.damage)
    if keep_first:
        hit &= rows.damage < 2
    take = hit | (rises & (rows.damage == 0))
    rows.kept = torch.where(per_row(take, rows.x), rows.x_adv, rows.kept)
    rows.logits = torch.where(take[:, None], logits, rows.logits)
    rows.damage = torch.maximum(rows.damage, now)
    rows.x_best = torch.where(per_row(rises, rows.x), rows.x_adv, rows.x_best)
    rows.grad_best = torch.where(per_row(rises, rows.x), rows.grad, rows.grad_best)
    rows.loss_best = torch.where(rises, loss, rows.loss_best)
    rows.rises = rows.rises + (loss > rows.loss_last)
    rows.loss_last = loss


def _check(rows: _Rows, length: int) -> None:
    stuck = (rows.rises <= RHO * length) | (~rows.reduced & (rows.loss_checked >= rows.loss_best))
    rows.step = torch.where(stuck, rows.step / 2, rows.step)
    rows.x_adv = torch.where(per_row(stuck, rows.x), rows.x_best, rows.x_adv)
    rows.grad = torch.where(per_row(stuck, rows.x), rows.grad_best, rows.grad)
    rows.reduced, rows.loss_checked, rows.rises = stuck, rows.loss_best, torch.zeros_like(rows.rises)


def _without_broken(aim: Aim, rows: _Rows, done: Climb) -> tuple[Aim, _Rows]:
    """The rows that go on: those whose group holds no safely broken row. The others are written down."""
    broken = rows.damage == 2
    keep = (~torch.isin(rows.group, rows.group[broken])).nonzero().squeeze(1)
    if keep.numel() == rows.index.numel():
        return aim, rows
    _write(rows, done)
    return aim[keep], rows[keep]


def _write(rows: _Rows, done: Climb) -> None:
    done.x_adv[rows.index], done.logits[rows.index], done.damage[rows.index] = rows.kept, rows.logits, rows.damage
