"""When an evaluation should not be believed: what is looked at before, after and, if asked for, beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatrock.attacks.craft import craft
from flatrock.attacks.gradient import GradientAttack
from flatrock.attacks.losses import cross_entropy
from flatrock.attacks.pgd import classified_right
from flatrock.core.records import Finding
from flatrock.core.threat import THREATS, Threat
from flatrock.evaluation.checks import (
    check_black_box,
    check_budget,
    check_climb,
    check_disputes,
    check_few_classes,
    check_finite,
    check_gradients,
    check_precision,
    check_probabilities,
    check_random,
    check_steps,
)
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.plans import Step, substitutes
from flatrock.evaluation.tally import Tally

# Samples the deep checks look at, and the steps whose losses they compare.
FEW = 128
LADDER = (1, 2, 5, 10, 20)


def doubts_before(exam: Exam, logits: Tensor, precision_note: str) -> list[Finding]:
    """Probabilities instead of logits, a randomised model, gradients that are zero, no half precision."""
    rows = torch.arange(min(exam.batch_size, exam.x.shape[0], FEW))
    x, y = exam.inputs(rows)
    again = exam.verdict(x).cpu()
    return [
        *check_probabilities(logits),
        *check_random(logits[rows], again),
        *check_gradients(_gradient_sizes(exam, x, y)),
        *check_precision(precision_note),
    ]


def doubts_after(steps: Sequence[Step], tally: Tally, *, samples: int, classes: int) -> list[Finding]:
    """No answer, few classes, disputed verdicts, black-box attacks that find more than white-box ones."""
    gains = {s.label: tally.costs[s.label]["broken"] / samples for s in steps if s.plan and _black_box(s)}
    return [
        *check_finite(tally.no_answer),
        *check_few_classes(substitutes(steps, classes), classes),
        *check_disputes(tally.disputed, samples),
        *check_black_box(gains),
    ]


def doubts_deep(exam: Exam, tally: Tally) -> list[Finding]:
    """Do more steps or restarts still help, does the loss rise along the way, does a huge budget break everything?"""
    rows = tally.first_rows(FEW)
    if len(rows) == 0:
        return []
    losses, standing = [], {}
    for steps in LADDER:
        loss, standing[steps] = _pgd(exam, rows, exam.threat, steps=steps)
        losses.append(loss)
    _, many_steps = _pgd(exam, rows, exam.threat, steps=100)
    _, many_starts = _pgd(exam, rows, exam.threat, steps=20, restarts=5)
    _, unlimited = _pgd(exam, rows, _huge(exam), steps=50, loss="margin")
    return [
        *check_steps(standing[20], many_steps, many_starts, len(rows)),
        *check_climb(dict(zip(LADDER, losses, strict=True))),
        *check_budget(unlimited, _huge(exam), len(rows)),
    ]


def _black_box(step: Step) -> bool:
    return step.label.rpartition("/")[2] in ("square", "rays")


def _gradient_sizes(exam: Exam, x: Tensor, y: Tensor) -> Tensor:
    """Largest entry of each sample's gradient of cross-entropy w.r.t. its input; zeros for a model without gradient."""
    leaf = x.detach().requires_grad_(True)
    with torch.enable_grad():
        logits = exam.model(leaf)
        if not logits.requires_grad:
            return torch.zeros(len(x))
        (grad,) = torch.autograd.grad(cross_entropy(logits, y).sum(), leaf)
    return grad.flatten(1).abs().amax(1).cpu()


def _huge(exam: Exam) -> Threat:
    """Half the width of the box, per pixel or in length: enough to turn any input into any grey one."""
    eps = 0.5 if exam.threat.norm == "linf" else 0.5 * exam.x[0].numel() ** 0.5
    return THREATS[exam.threat.norm](eps)


def _pgd(
    exam: Exam, rows: Tensor, threat: Threat, *, steps: int, restarts: int = 1, loss: str = "ce"
) -> tuple[float, float]:
    """Mean cross-entropy at what PGD found, and the share still right; no early stop, so that losses compare."""
    x, y = exam.inputs(rows)
    attack = GradientAttack(loss=loss, steps=steps, restarts=restarts)
    gen = exam.seed.child("doubt").samples(rows.to(exam.device))
    logits = exam.verdict(craft(attack, exam.crafting, x, y, threat, gen))
    return float(cross_entropy(logits, y).mean()), float(classified_right(logits, y).double().mean())
