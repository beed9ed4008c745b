"""Who still stands: the flags of every attack, kept while chunks come in."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatrock.attacks.craft import SLACK
from flatrock.attacks.pgd import classified_right
from flatrock.core.threat import Threat
from flatrock.core.threat import rows as per_row
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.journal import Chunk
from flatrock.evaluation.plans import Step

COUNTED = ("seconds", "forwards", "backwards")
QUERIES = "queries"
NEIGHBOURS = "neighbours"  # other processes with the same GPU open, of chunks in whose time somebody looked
LEVELS = 255


class Tally:
    """Flags, labels, margins, costs, distances and (if asked for) the adversarial inputs of an evaluation."""

    def __init__(self, y: Tensor, logits: Tensor, margins: Tensor, x: Tensor | None) -> None:
        self._clean = classified_right(logits, y)
        self.labels = y.clone()  # whatever the caller does with theirs
        self.classes = logits.shape[1]
        self.predictions = logits.argmax(1)
        self.flags: dict[str, Tensor] = {"clean": self._clean}
        self.margins = {"clean": margins, "worst": margins.clone()}
        self.distances: dict[str, Tensor] = {}
        self.costs: dict[str, dict[str, float]] = {}
        self.plans: dict[str, tuple[str, ...]] = {}
        self.no_answer: dict[str, int] = {}
        self.disputed = 0
        self.neighbours: list[float] = []
        self.adversarial = None if x is None else x.detach().cpu().clone()
        self.rounded = self._clean.clone()

    @property
    def survivors(self) -> Tensor:
        """Per sample: right, and survived everything so far."""
        return torch.stack(list(self.flags.values())).all(0)

    @property
    def standing(self) -> float:
        """Share of all samples that survived everything so far."""
        return float(self.survivors.double().mean())

    def candidates(self, step: Step) -> Tensor:
        """The samples a step is tried on: those right without attack, in a plan those its earlier attacks left."""
        earlier = self.plans.get(step.plan, ()) if step.plan else ()
        flag = self.flags[earlier[-1]] if earlier else self._clean
        return flag.nonzero().squeeze(1)

    def begin(self, step: Step, *, measured: bool = False) -> None:
        """Open the account of a step; `measured` if its chunks bring distances."""
        start = torch.zeros_like(self._clean)
        start[self.candidates(step)] = True
        self.flags[step.label] = start
        self.costs[step.label] = {"samples": float(start.sum()), "broken": 0.0, **dict.fromkeys(COUNTED, 0.0)}
        if measured:  # a sample that is wrong without attack is no candidate: it has no way to go
            self.distances[step.label] = torch.zeros_like(self._clean, dtype=torch.float64)
            self.costs[step.label][QUERIES] = 0.0
        self.no_answer[step.label] = 0
        if step.plan:
            self.plans[step.plan] = (*self.plans.get(step.plan, ()), step.label)

    def add(self, step: Step, chunk: Chunk) -> None:
        """Enter what one batch brought."""
        first = self.survivors[chunk.rows][~chunk.right]
        cost = self.costs[step.label]
        for name in COUNTED:
            cost[name] += chunk.numbers[name]
        cost["broken"] += float((~chunk.right).sum())
        if chunk.distances is not None:
            self.distances[step.label][chunk.rows] = chunk.distances.double()
            cost[QUERIES] += chunk.numbers[QUERIES]
        self.no_answer[step.label] += int(chunk.numbers["no_answer"])
        self.disputed += int(chunk.numbers["disputed"])
        self.neighbours += [chunk.numbers[NEIGHBOURS]] if NEIGHBOURS in chunk.numbers else []
        self.flags[step.label][chunk.rows] = chunk.right
        worst = self.margins["worst"]
        # Logits that are no answer have no margin (nor could JSON hold it): 0, and never more for a broken sample.
        margin = torch.where(torch.isfinite(chunk.margin), chunk.margin, 0)
        margin = torch.where(chunk.right, margin, margin.clamp(max=0))
        worst[chunk.rows] = torch.minimum(worst[chunk.rows], margin)
        if self.adversarial is not None:  # the first attack that broke a sample keeps its input
            self.adversarial[chunk.rows[~chunk.right][first]] = chunk.x_adv[first]

    def add_rounded(self, exam: Exam, step: Step, chunk: Chunk) -> None:
        """Who is broken by what a batch brought in 8 bits per channel, too: an image file cannot hold more."""
        rows, found = chunk.rows[~chunk.right], chunk.x_adv
        while len(rows):
            done = exam.fitting(partial(self._judge_rounded, exam, step, found), rows)
            rows, found = rows[done:], found[done:]

    def _judge_rounded(self, exam: Exam, step: Step, found: Tensor, rows: Tensor) -> int:
        """How many rows were judged, the first of those `found` is of."""
        x, y = exam.inputs(rows)
        x_adv, inside = in_8_bits(found[: len(rows)].to(exam.device), x, exam.threat)
        logits = exam.judged(f"{step.label}: rounded", rows, x_adv, y)
        self.rounded[rows] &= (classified_right(logits, y) | ~inside).cpu()
        return len(rows)

    def kept(self) -> dict[str, Any]:
        """What a Result takes over as it is."""
        names = ("flags", "labels", "predictions", "plans", "margins", "distances", "adversarial", "costs", "rounded")
        return {name: getattr(self, name) for name in names}

    def first_rows(self, count: int) -> Tensor:
        """A few samples that are right without attack, spread over the set."""
        rows = self._clean.nonzero().squeeze(1)
        return rows[torch.linspace(0, len(rows) - 1, min(count, len(rows))).long()] if len(rows) else rows


def in_8_bits(x_adv: Tensor, x: Tensor, threat: Threat) -> tuple[Tensor, Tensor]:
    """Each input at the nearest levels of 8 bits, towards x where these leave the ball; whether it is in the ball."""
    most = torch.full((), LEVELS, dtype=x_adv.dtype, device=x_adv.device)  # as `dataset.scaled` divides, on any device
    levels = most * x_adv
    nearest = levels.round() / most
    near = 1e-3  # a level that rounding missed by a little is that level
    inwards = torch.where(x_adv > x, (levels + near).floor(), (levels - near).ceil()) / most
    fits = threat.size(nearest - x) <= threat.eps + SLACK
    found = torch.where(per_row(fits, x), nearest, inwards)
    return found, threat.size(found - x) <= threat.eps + SLACK
