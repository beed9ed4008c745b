"""One evaluation: who is asked what, in which batches, with which model for crafting and which for the verdict."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from flatrock.attacks.answers import answer, named
from flatrock.attacks.craft import answered, check_crafted, craft
from flatrock.attacks.gradient import judges_last
from flatrock.attacks.losses import margin
from flatrock.attacks.nearest import Reached, Seeker, seeker
from flatrock.attacks.pgd import classified_right
from flatrock.attacks.transfer import Transfer
from flatrock.attacks.written import is_ours
from flatrock.core.borrow import borrowed, full_precision
from flatrock.core.device import memory_is_short
from flatrock.core.rng import SampleGen, Seed, kept_global_rng
from flatrock.core.tensorfile import digest
from flatrock.core.threat import Threat
from flatrock.core.threat import rows as per_row
from flatrock.core.types import Attack
from flatrock.evaluation.fast_model import Counted
from flatrock.evaluation.journal import Chunk
from flatrock.evaluation.plans import Step
from flatrock.evaluation.untouched import Untouched
from flatrock.evaluation.votes import check_votes, majority
from flatrock.models.sizes import Filled

T = TypeVar("T")
# Samples attacked together unless told otherwise; halved when memory does not hold them.
CPU_BATCH, GPU_BATCH = 256, 2048
FEW = 32  # inputs by whose answers a network is known again
# A nearest point lies where rounding decides; one that a second pass calls right is moved this much further out.
OUTWARDS = (1.001, 1.01)


def samples_digest(x: Tensor, y: Tensor) -> str:
    """Of inputs and labels, in their order."""
    return digest({"x": x.cpu().contiguous(), "y": y.cpu().contiguous()}, "")


@dataclass
class Exam:
    """What is asked of whom, the same for every attack; `crafting` may be a faster, less precise twin of `model`."""

    model: nn.Module
    crafting: Counted
    x: Tensor
    y: Tensor
    threat: Threat
    device: torch.device
    batch_size: int
    seed: Seed
    surrogate: Counted | None = None  # what transfers craft on
    ids: Tensor | None = None  # whom random numbers belong to; None: the row of x
    exact: bool = True  # whether crafting is the model itself
    votes: int = 1  # answers of the model that decide about a sample, by majority
    random: bool = False  # whether the model answers the same input differently (E05)
    classes: int | None = None  # what the clean pass has found

    def __post_init__(self) -> None:
        self.votes = check_votes(self.votes)

    @cached_property
    def samples_digest(self) -> str:
        """Of inputs and labels, in their order."""
        return samples_digest(self.x, self.y)

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels of these rows on the device."""
        return self.x[rows.to(self.x.device)].to(self.device), self.y[rows.to(self.y.device)].to(self.device)

    def randomness(self, purpose: str, rows: Tensor) -> SampleGen:
        """Random numbers of these samples, the same in any order and any part of the data."""
        return self.seed.child(purpose).samples((rows if self.ids is None else self.ids[rows]).to(self.device))

    @contextmanager
    def drawing(self, purpose: str, rows: Tensor) -> Iterator[None]:
        """What the model itself draws from torch's generators follows from seed, purpose and the first of these rows.

        Crafting gives the generators back as they were: a verdict that went on from there would see the very noise that
        the attack has seen. A batch has these numbers, not a sample: nobody can tell a model whose they are.
        """
        first = rows[0] if self.ids is None else self.ids[rows[0]]
        with kept_global_rng(self.device, self.seed.child("draws", purpose, int(first))):
            yield

    @property
    def leaves_early(self) -> bool:
        """Whether samples leave an attack once broken: not if one unlucky draw says so and a majority will decide."""
        return self.votes == 1 or not self.random

    def verdict(self, x: Tensor) -> Tensor:
        """Logits in full precision."""
        with torch.no_grad(), full_precision(self.device):
            logits: Tensor = self.model(x)
            return logits

    def judged(self, purpose: str, rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The logits that decide about x, made of these rows: those of fresh answers, as many as there are votes."""
        with self.drawing(f"{purpose}: verdict", rows):
            return majority(lambda: answer(self.verdict, x, self.classes), y, self.votes)

    def clean_pass(self) -> tuple[Tensor, Tensor]:
        """Logits of every unperturbed input and the margins of the true class (on the CPU)."""
        logits, margins = [], []
        rows = torch.arange(self.x.shape[0])
        while len(rows):
            said, y = self.fitting(self._answers, rows)
            logits.append(said.cpu())
            margins.append(-margin(said, y).cpu())
            rows = rows[len(said) :]
        self.classes = said.shape[1]
        return torch.cat(logits), torch.cat(margins)

    def _answers(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.inputs(rows)
        with self.drawing("clean", rows):
            return majority(lambda: answered(self.verdict, x, y), y, self.votes), y

    def measures(self, step: Step) -> Seeker | None:
        """How a step tells distances, if it does.

        A plan wants to know who breaks, so its attacks stop there; on its own an attack may tell how far it went.
        """
        return None if step.plan else seeker(_fitted(step.attack, self.batch_size), self.threat)

    def attempt(self, step: Step, rows: Tensor) -> Chunk:
        """Try one attack on the first batch of these samples."""

        def work(part: Tensor) -> Chunk:
            with self.drawing(step.label, part), self._guarded(step), named(step.label):
                return self._attempt(step, part)

        return self.fitting(work, rows)

    @cached_property
    def _untouched(self) -> Untouched:
        """What attacks get, and who judges, as they were before the first attack of the user's."""
        reached = [self.crafting, None if self.exact else Counted(self.model), self.surrogate]
        few = None if self.random else partial(self._few, size=self.batch_size)
        return Untouched([network for network in reached if network is not None], few)

    def _few(self, network: Counted, purpose: str, size: int) -> Tensor:
        """What a network answers to a few inputs, `size` at a time; no attack made this pass."""
        rows = torch.arange(min(FEW, len(self.x)))
        with self.drawing(purpose, rows), torch.no_grad(), full_precision(self.device):
            return torch.cat([network.aside(part) for part in torch.split(self.inputs(rows)[0], size)])

    @contextmanager
    def _guarded(self, step: Step) -> Iterator[None]:
        """ModelError, before anything is kept, if an attack of the user's changes a network, in whatever way."""
        known = None if is_ours(step.attack) else self._untouched
        yield
        if known is not None:
            known.check(repr(step.label))

    def fitting(self, work: Callable[[Tensor], T], rows: Tensor) -> T:
        """Work on the first batch of these samples; where memory is short, on half of it, from then on."""
        while True:
            part = rows[: self.batch_size]
            try:
                return work(part)
            except RuntimeError as error:
                if len(part) == 1 or not memory_is_short(error):
                    raise
            # Outside the handler: what the failed pass had allocated is free by now.
            self.batch_size = len(part) // 2
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _attempt(self, step: Step, rows: Tensor) -> Chunk:
        begun = time.perf_counter()
        self.crafting.classes = self.classes
        x, y = self.inputs(rows)
        gen = self.randomness(step.label, rows)
        seek = self.measures(step)
        if seek is None:
            tried = self._crafted(step, rows, x, y, gen)
        else:
            tried = self._measured(seek, x, y, gen)
        logits = tried.logits
        right = classified_right(logits, y)
        return Chunk(
            label=step.label,
            rows=rows,
            right=right.cpu(),
            margin=-margin(logits, y).cpu(),
            x_adv=tried.x_adv[~right].cpu(),
            numbers={
                "seconds": time.perf_counter() - begun,
                "no_answer": int((~torch.isfinite(logits).all(1)).sum()),
                **tried.numbers,
            },
            distances=tried.distances,
        )

    def _crafted(self, step: Step, rows: Tensor, x: Tensor, y: Tensor, gen: SampleGen) -> _Tried:
        """Inputs in the ball and the verdict on them; samples leave when they are broken, if any point may do it."""
        attack = _fitted(step.attack, self.batch_size)
        leaves = self.leaves_early and not judges_last(attack)
        x_adv = craft(attack, self.crafting, x, y, self.threat, gen, early_stop=leaves)
        logits = self.judged(step.label, rows, x_adv, y)
        disputed = 0
        # A transfer did not ask the fast twin; and nobody gave up on what the twin says where samples do not leave.
        if not self.exact and leaves and not isinstance(attack, Transfer):
            with torch.no_grad():
                claimed = ~classified_right(self.crafting.inner(x_adv), y)
            again = (claimed & classified_right(logits, y)).nonzero().squeeze(1)
            disputed = again.numel()
            if disputed:  # broken, said the fast twin; the model itself decides, and is attacked itself
                # The twin was made because its rows do not depend on each other.
                counted = Counted(Filled(self.model), self.classes)
                with full_precision(self.device):
                    tried = craft(attack, counted, x[again], y[again], self.threat, gen[again], early_stop=True)
                self.crafting.forwards += counted.forwards
                self.crafting.backwards += counted.backwards
                x_adv[again] = tried
                logits[again] = self.judged(f"{step.label} again", rows[again.cpu()], tried, y[again])
        asked = [self.crafting.taken(), *([] if self.surrogate is None else [self.surrogate.taken()])]
        forwards, backwards = (sum(counts) for counts in zip(*asked, strict=True))
        numbers = {"forwards": forwards + self.votes * len(x), "backwards": backwards, "disputed": disputed}
        return _Tried(x_adv, logits, numbers)

    def _measured(self, seek: Seeker, x: Tensor, y: Tensor, gen: SampleGen) -> _Tried:
        """How far the nearest adversarial points lie, by the model itself: they are where rounding decides."""
        counted = Counted(self.model, self.classes)
        with borrowed(counted, self.device), full_precision(self.device):
            found = seek(counted, x, y, self.threat, gen)
            queries = counted.forwards
            points, distances = self._confirmed(counted, x, y, found)
            broken = distances <= self.threat.eps
            x_adv = torch.where(per_row(broken, x), points, x)
            check_crafted(x_adv, x, self.threat, "the nearest point")
            with torch.no_grad():
                logits = majority(lambda: counted(x_adv), y, self.votes)
        # Who is broken follows from the last pass, as everywhere, and the distance from that.
        wrong = ~classified_right(logits, y)
        distances = distances.masked_fill(broken & ~wrong, torch.inf).masked_fill(wrong & ~broken, 0)
        forwards, backwards = counted.taken()
        numbers = {"forwards": forwards, "backwards": backwards, "disputed": 0, "queries": queries}
        return _Tried(x_adv, logits, numbers, distances.cpu())

    def _confirmed(self, model: nn.Module, x: Tensor, y: Tensor, found: Reached) -> tuple[Tensor, Tensor]:
        """The points and float64 distances that a second pass confirms; one that rounding undid is moved outwards."""
        points, distances = found.points.clone(), found.distances.double()

        def refuted(rows: Tensor) -> Tensor:
            with torch.no_grad():
                if not rows.numel():
                    return rows
                said = majority(lambda: model(points[rows]), y[rows], self.votes)
                return rows[classified_right(said, y[rows])]

        doubtful = refuted(torch.isfinite(distances).nonzero().squeeze(1))
        for factor in OUTWARDS:
            clean = x[doubtful]
            points[doubtful] = (clean + factor * (found.points[doubtful] - clean)).clamp(0, 1)
            distances[doubtful] = self.threat.size(points[doubtful] - clean).double()
            doubtful = refuted(doubtful)
        distances[doubtful] = torch.inf
        return points, distances


@dataclass(frozen=True)
class _Tried:
    """What an attack came to: inputs in the ball, the model's answers to them, counts, and distances if measured."""

    x_adv: Tensor
    logits: Tensor
    numbers: Mapping[str, float]
    distances: Tensor | None = None


def _fitted(attack: Attack, batch_size: int) -> Attack:
    """An attack that puts several rows per sample through the network keeps to the batch size too."""
    if isinstance(attack, Transfer):
        return dataclasses.replace(attack, by=_fitted(attack.by, batch_size))
    if not is_ours(attack):  # what it calls rows is its own affair
        return attack
    names: set[str] = {f.name for f in dataclasses.fields(attack)} if dataclasses.is_dataclass(attack) else set()
    return dataclasses.replace(attack, rows=2 * batch_size) if "rows" in names else attack  # type: ignore[type-var]
