"""When an evaluation should not be believed: what is looked at before, after and, if asked for, beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from flatrock.attacks.answers import answer
from flatrock.attacks.craft import asked, craft
from flatrock.attacks.gradient import GradientAttack, idle
from flatrock.attacks.losses import cross_entropy
from flatrock.attacks.pgd import classified_right, slope
from flatrock.attacks.rays import RayS
from flatrock.attacks.square import Square
from flatrock.attacks.transfer import Transfer
from flatrock.core.device import memory_is_short
from flatrock.core.errors import FlatrockError, ModelError, in_words
from flatrock.core.records import Finding
from flatrock.core.rounding import gap
from flatrock.core.threat import L2, Linf, Threat
from flatrock.core.types import Attack
from flatrock.evaluation.checks import (
    check_black_box,
    check_chance,
    check_collapse,
    check_disputes,
    check_dynamic,
    check_few_classes,
    check_finite,
    check_gradients,
    check_idle,
    check_precision,
    check_probabilities,
    check_random,
)
from flatrock.evaluation.deep_checks import check_budget, check_climb, check_steps
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.plans import Step, substitutes
from flatrock.evaluation.tally import Tally

# Samples the deep checks look at, and the steps whose losses they compare.
FEW = 128
LADDER = (1, 2, 5, 10, 20)
# Other samples whose answers are tried within a huge budget.
OTHERS = 8
# The largest L2 radius there is.
LONGEST = 388.0
# What every way to ask torch for gradients comes down to.
GRADIENTS: dict[CodeType, str] = {
    torch.autograd.grad.__code__: "torch.autograd.grad",
    torch.autograd.backward.__code__: "torch.autograd.backward",
}


def doubts_before(exam: Exam, steps: Sequence[Step], logits: Tensor, precision_note: str) -> list[Finding]:
    """Probabilities instead of logits, a randomised model or one that takes gradients itself, gradients that are zero
    or not finite, one answer to everything or answers as good as guesses, attacks without steps, no half precision.

    ModelError, now and not after the attacks before it, if an attack climbs a model that has no gradient at all. The
    exam learns whether the model is random.
    """
    rows = torch.arange(min(exam.batch_size, exam.x.shape[0], FEW))
    company = _in_company(rows)
    with _gradients_taken() as called:
        again = _again(exam, company, "again")
    refusals: list[ModelError] = []
    sizes = exam.fitting(lambda part: _gradient_sizes(exam, part, refusals), rows)
    # Where gradients exist at the inputs themselves, there may be none beside them, where attacks begin or soon are.
    look = not refusals and exam.threat.eps > 0
    moved = exam.fitting(lambda part: _gradient_sizes(exam, part, [], moved=True), rows) if look else None
    climbs = next((step.label for step in steps if _climbs(step.attack)), None)
    if climbs and refusals:
        raise ModelError(f"attack {climbs!r} needs gradients, but {refusals[0]}; 'square' needs none") from refusals[0]
    means = any(getattr(step.attack, "eot", 1) > 1 for step in steps)
    mixed = _mixed(exam, logits, company, again)
    differs = check_random(logits[company], again, votes=exam.votes, means=means, mixed=mixed)
    exam.random = bool(differs) and not mixed
    return [
        *check_probabilities(logits),
        *differs,
        *check_dynamic(called),
        *check_collapse(logits, exam.y.cpu()),
        *check_chance(logits, exam.y.cpu()),
        *check_gradients(sizes, moved),
        *check_idle([step.label for step in steps if idle(step.attack)]),
        *check_precision(precision_note),
    ]


def _in_company(rows: Tensor) -> Tensor:
    """Every second of these rows, twice: a batch that the clean pass did not make, and of the same size.

    There are networks of one batch size.
    """
    return torch.cat([rows[::2], rows[::2]])[: len(rows)]


def _again(exam: Exam, rows: Tensor, purpose: str) -> Tensor:
    """What the model says to one batch of these rows, with draws of its own."""
    with exam.drawing(purpose, rows):
        return answer(exam.verdict, exam.inputs(rows)[0], exam.classes).cpu()


def _mixed(exam: Exam, logits: Tensor, company: Tensor, again: Tensor) -> bool:
    """Whether answers `again` are others than in the clean pass, but batches that are asked twice repeat their own.

    Then they depend on the rest of the batch; if not even that repeats, they are random.
    """
    if gap(logits[company], again) == 0:
        return False
    first = torch.arange(min(exam.batch_size, exam.x.shape[0]))
    repeated = gap(logits[first], _again(exam, first, "clean batch again"))
    return repeated == gap(again, _again(exam, company, "once more")) == 0


@contextmanager
def _gradients_taken() -> Iterator[list[str]]:
    """The functions of torch, each once, that this thread asked for gradients; whoever profiles it goes on doing so."""
    called: list[str] = []
    before = sys.getprofile()

    def watch(frame: FrameType, event: Any, arg: Any) -> None:
        name = GRADIENTS.get(frame.f_code) if event == "call" else None
        if name is not None and name not in called:
            called.append(name)
        if before is not None:
            before(frame, event, arg)

    sys.setprofile(watch)
    try:
        yield called
    finally:
        sys.setprofile(before)


def _climbs(attack: Attack) -> bool:
    """Whether an attack asks for gradients of the model."""
    return not (_black_box(attack) or isinstance(attack, Transfer)) and getattr(attack, "steps", 1) > 0


def doubts_after(steps: Sequence[Step], tally: Tally, *, classes: int) -> list[Finding]:
    """No answer, few classes, disputed verdicts, black-box attacks that find more than white-box ones."""
    found = {s.label: int(tally.costs[s.label]["broken"]) for s in steps if s.plan and _black_box(s.attack)}
    samples = len(tally.labels)
    return [
        *check_finite(tally.no_answer),
        *check_few_classes(substitutes(steps, classes), classes),
        *check_disputes(tally.disputed, samples),
        *check_black_box(found, samples),
    ]


def doubts_deep(exam: Exam, tally: Tally) -> list[Finding]:
    """Does a longer attack find more, does the loss rise along the way, does a huge budget break everything?"""
    rows = tally.first_rows(FEW)
    if len(rows) == 0 or not _has_gradient(exam, *exam.inputs(rows[:1])):
        return []  # a model without gradients has its finding already
    stood = tally.survivors[rows]
    losses = {steps: _pgd(exam, rows, exam.threat, steps=steps)[0] for steps in LADDER}
    _, after_steps = _pgd(exam, rows, exam.threat, steps=100)
    _, after_starts = _pgd(exam, rows, exam.threat, steps=20, restarts=5)
    gains = {
        "100 steps": int((stood & ~after_steps).sum()),
        "20 steps and 5 restarts": int((stood & ~after_starts).sum()),
    }
    huge = _huge(exam)
    _, standing = _pgd(exam, rows, huge, steps=50, loss="margin")
    missed = standing & (_reached(exam, rows, huge) | (~stood & (exam.threat.eps <= huge.eps)))
    planned = any(plan.startswith("autoattack") for plan in tally.plans)
    return [
        *check_steps(gains, len(rows), random=exam.random, votes=exam.votes, planned=planned),
        *check_climb(losses, random=exam.random),
        *check_budget(float(missed.double().mean()), huge, len(rows), random=exam.random),
    ]


def _black_box(attack: Attack) -> bool:
    return isinstance(attack, Square | RayS)


def _has_gradient(exam: Exam, x: Tensor, y: Tensor) -> bool:
    try:
        _slopes(exam, x, y)
    except ModelError:
        return False
    return True


def _slopes(exam: Exam, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's cross-entropy and its gradient w.r.t. the input, as attacks see it; ModelError if there is none."""
    leaf = x.detach().requires_grad_(True)
    with torch.enable_grad():
        losses = cross_entropy(answer(partial(asked, exam.crafting.inner), leaf, exam.classes), y)
        total = losses.sum()
    try:
        return losses.detach(), slope(total, leaf)
    except Exception as error:  # layers may have a backward pass of their own, or overwrite what torch kept for its
        if isinstance(error, FlatrockError) or memory_is_short(error):
            raise
        raise ModelError(
            f"the model's backward pass fails: {in_words(error)}; an operation in place, or a backward of its own?"
        ) from error


def _moved(x: Tensor, delta: Tensor) -> Tensor:
    """x + delta, turned inwards where it leaves the box: cut off there, pixels would be black and white as data are."""
    there = x + delta
    return torch.where((there < 0) | (there > 1), x - delta, there).clamp(0, 1)


def _gradient_sizes(exam: Exam, rows: Tensor, refusals: list[ModelError], *, moved: bool = False) -> Tensor:
    """Largest entry of the gradient of each of these samples; zeros, and a refusal more, for none.

    `moved`: at a random point of each ball, without those at which the model has no answer: they need no gradient.
    """
    x, y = exam.inputs(rows)
    if moved:
        x = _moved(x, exam.threat.sample(x, exam.randomness("doubt: start", rows)))
    try:
        losses, slopes = _slopes(exam, x, y)
        sizes = slopes.flatten(1).abs().amax(1)
        return (sizes[torch.isfinite(losses)] if moved else sizes).cpu()
    except ModelError as error:
        refusals.append(error)
        return torch.zeros(len(rows))


def _huge(exam: Exam) -> Threat:
    """Half the width of the box, per pixel or in length: enough to turn any input into any grey one."""
    if exam.threat.norm == Linf.norm:
        return Linf(0.5)
    return L2(min(0.5 * exam.x[0].numel() ** 0.5, LONGEST))


def _reached(exam: Exam, rows: Tensor, threat: Threat) -> Tensor:
    """Who has a wrong answer in the ball that needs no search: to plain grey, or to another sample moved into it."""
    wrong = torch.zeros(len(rows), dtype=torch.bool)
    for shift in range(min(OTHERS + 1, len(rows))):  # 0 stands for grey
        for part in torch.split(torch.arange(len(rows)), exam.batch_size):
            x, y = exam.inputs(rows[part])
            other = torch.full_like(x, 0.5) if shift == 0 else exam.inputs(rows.roll(shift)[part])[0]
            logits = exam.judged("doubt", rows[part], (x + threat.project(other - x)).clamp(0, 1), y)
            wrong[part] |= ~classified_right(logits, y).cpu()
    return wrong


def _pgd(
    exam: Exam, rows: Tensor, threat: Threat, *, steps: int, restarts: int = 1, loss: str = "ce"
) -> tuple[float, Tensor]:
    """Mean cross-entropy at what PGD found, and who is still right.

    Fewer steps are a prefix of more, so their losses compare; a sample that is broken keeps its loss from then on.
    """
    attack = GradientAttack(loss=loss, steps=steps, restarts=restarts)
    losses, right = [], []
    for part in torch.split(rows, exam.batch_size):
        x, y = exam.inputs(part)
        gen = exam.randomness("doubt", part)
        with exam.drawing("doubt", part):
            x_adv = craft(attack, exam.crafting, x, y, threat, gen, early_stop=exam.leaves_early)
        logits = exam.judged("doubt", part, x_adv, y)
        losses.append(cross_entropy(logits, y).double().cpu())
        right.append(classified_right(logits, y).cpu())
    return float(torch.cat(losses).mean()), torch.cat(right)
