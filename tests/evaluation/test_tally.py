"""Who still stands: candidates of attacks and plans, first breakers, margins, rounding to 8 bits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.attacks.gradient import GradientAttack
from flatrock.core.records import Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf, Threat
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.fast_model import Counted
from flatrock.evaluation.journal import Chunk
from flatrock.evaluation.plans import Step
from flatrock.evaluation.tally import Tally, in_8_bits

ATTACK = GradientAttack(steps=1)
ALONE, OTHER = Step("alone", ATTACK), Step("other", ATTACK)
FIRST, SECOND, THIRD = (Step(f"plan/{name}", ATTACK, "plan") for name in ("first", "second", "third"))


def tally(x: Tensor | None = None) -> Tally:
    """Six samples of two classes; sample 5 is wrong without attack."""
    y = torch.zeros(6, dtype=torch.int64)
    logits = torch.tensor([[2.0, 0.0]] * 5 + [[0.0, 1.0]])
    return Tally(y, logits, logits[:, 0] - logits[:, 1], x)


def chunk(step: Step, rows: list[int], broken: list[int], *, value: float = 0.5, margin: float = -1.0) -> Chunk:
    right = torch.tensor([row not in broken for row in rows])
    return Chunk(
        label=step.label,
        rows=torch.tensor(rows),
        right=right,
        margin=torch.where(right, 1.0, margin),
        x_adv=torch.full((len(broken), 3), value),
        numbers={"seconds": 2.0, "forwards": 10, "backwards": 5, "no_answer": 0, "disputed": 1},
    )


def entered(book: Tally, step: Step, broken: list[int], **more: Any) -> list[int]:
    """Begin a step, enter one chunk of all its candidates, and say who they were."""
    rows: list[int] = book.candidates(step).tolist()
    book.begin(step)
    book.add(step, chunk(step, rows, broken, **more))
    return rows


def test_independent_attacks_see_every_sample_that_is_right() -> None:
    book = tally()
    assert entered(book, ALONE, [0, 1]) == [0, 1, 2, 3, 4]
    assert entered(book, OTHER, [1, 2]) == [0, 1, 2, 3, 4]
    assert book.flags["alone"].tolist() == [False, False, True, True, True, False]
    assert book.flags["other"].tolist() == [True, False, False, True, True, False]
    assert book.survivors.tolist() == [False, False, False, True, True, False]
    assert book.standing == 2 / 6


def test_attacks_of_a_plan_share_survivors() -> None:
    book = tally()
    entered(book, ALONE, [4])
    assert entered(book, FIRST, [0, 1]) == [0, 1, 2, 3, 4], "what another attack broke is no concern of the plan"
    assert entered(book, SECOND, []) == [2, 3, 4]
    assert entered(book, THIRD, [2]) == [2, 3, 4]
    assert book.plans == {"plan": ("plan/first", "plan/second", "plan/third")}
    kept = [book.flags[name] for name in ("clean", *book.plans["plan"])]
    assert all(bool((later <= earlier).all()) for earlier, later in pairwise(kept))
    assert kept[-1].tolist() == [False, False, False, True, True, False]
    assert book.costs["plan/third"] == {"samples": 3, "broken": 1, "seconds": 2, "forwards": 10, "backwards": 5}


def test_the_flags_of_a_real_plan_only_fall() -> None:
    with kept_global_rng(seed=Seed(0).child("plan")):
        first, last = nn.Linear(6, 16), nn.Linear(16, 4, bias=False)
    with torch.no_grad():
        first.weight.mul_(3)
        first.bias.copy_(-first.weight.sum(1) / 2)  # centred, so that it answers with every class
    model = nn.Sequential(first, nn.Tanh(), last).eval()
    x = torch.rand(40, 6, generator=Seed(1).generator())
    y = model(x).argmax(1).detach()
    result = evaluate(model, x, y, Linf(0.1), attacks=["fast", "pgd-5"])
    first, second = (result.flags[name] for name in result.plans["fast"])
    assert 0 < int(second.sum()) <= int(first.sum()) < 40
    assert bool((second <= first).all())
    assert result.costs["fast/apgd-t"]["samples"] == int(first.sum())
    assert result.costs["pgd-5"]["samples"] == 40
    assert set(result.per_attack) == {"fast", "pgd-5"}
    assert result.per_attack["fast"] == float(second.double().mean())


def test_a_step_counts_what_its_chunks_bring() -> None:
    book = tally()
    book.begin(ALONE)
    assert book.flags["alone"].tolist() == [True] * 5 + [False], "nobody is broken before it is tried"
    book.add(ALONE, chunk(ALONE, [0, 1, 2], [1]))
    book.add(ALONE, chunk(ALONE, [3, 4], [3, 4]))
    assert book.costs["alone"] == {"samples": 5, "broken": 3, "seconds": 4, "forwards": 20, "backwards": 10}
    assert book.disputed == 2
    assert book.no_answer == {"alone": 0}


def test_distances_are_zero_for_who_is_wrong_anyway_and_queries_add_up() -> None:
    book = tally()
    book.begin(ALONE, measured=True)
    assert book.distances["alone"].tolist() == [0.0] * 6
    for rows, far in (([0, 1, 2], [0.1, 0.2, torch.inf]), ([3, 4], [0.3, 0.4])):
        made = chunk(ALONE, rows, [])
        numbers = {**made.numbers, "queries": 50}
        book.add(ALONE, Chunk(**{**vars(made), "numbers": numbers, "distances": torch.tensor(far)}))
    assert book.distances["alone"].dtype == torch.float64
    assert book.distances["alone"].tolist() == pytest.approx([0.1, 0.2, torch.inf, 0.3, 0.4, 0.0])
    assert book.costs["alone"]["queries"] == 100


def test_the_first_breaker_keeps_its_input_and_the_rest_keep_theirs() -> None:
    x = torch.full((6, 3), 0.25)
    book = tally(x)
    entered(book, ALONE, [0], value=0.5)
    entered(book, OTHER, [0, 1], value=0.75)
    assert book.adversarial is not None
    assert book.adversarial[:, 0].tolist() == [0.5, 0.75, 0.25, 0.25, 0.25, 0.25]
    assert bool((x == 0.25).all()), "the user's inputs are not written to"


def test_the_worst_margin_is_the_smallest() -> None:
    book = tally()
    entered(book, ALONE, [0], margin=-1.0)
    entered(book, OTHER, [0, 1], margin=-0.5)
    assert book.margins["worst"].tolist() == [-1.0, -0.5, 1.0, 1.0, 1.0, -1.0]
    assert book.margins["clean"].tolist() == [2.0] * 5 + [-1.0]


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), -float("inf"), 3.0])
def test_a_broken_sample_never_has_a_positive_or_infinite_margin(margin: float) -> None:
    book = tally()
    entered(book, ALONE, [0, 2], margin=margin)
    assert book.margins["worst"].tolist() == [0.0, 1.0, 0.0, 1.0, 1.0, -1.0]


class Infinite(nn.Module):
    """The logit of class 1 is infinite where the first coordinate left 0.5 by more than 0.1."""

    def forward(self, x: Tensor) -> Tensor:
        far = ((x[:, 0] - 0.5).abs() > 0.1).to(x.dtype)
        return torch.stack([x.sum(1), 0.5 * x[:, 0] / (1 - far)], 1)


def test_infinite_logits_go_to_json() -> None:
    x, y = torch.full((4, 3), 0.5), torch.zeros(4, dtype=torch.int64)
    result = evaluate(Infinite(), x, y, Linf(0.2), attacks=["fgsm"])
    assert (result.clean, result.robust) == (1, 0)
    again = Result.from_json(result.to_json())
    assert again.margins["worst"].tolist() == [0.0] * 4


# Rounding


class Edge(nn.Module):
    """Class 1 above 10.3 / 255, between two grey levels of 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), 255 * x - 10.3], 1)


def edge_book(threat: Threat) -> tuple[Exam, Tally]:
    """Three samples of class 0, at 5, 10 and 10 of 255."""
    x, y = torch.tensor([[5.0], [10.0], [10.0]]) / 255, torch.zeros(3, dtype=torch.int64)
    exam = Exam(Edge(), Counted(Edge()), x, y, threat, torch.device("cpu"), 8, Seed(0))
    return exam, Tally(y, *exam.clean_pass(), None)


def tried(exam: Exam, book: Tally, step: Step, levels: list[float]) -> None:
    """Samples 1 and 2 are broken at these levels of 255."""
    book.begin(step)
    made = chunk(step, [0, 1, 2], [1, 2])
    made = Chunk(**{**vars(made), "x_adv": torch.tensor(levels)[:, None] / 255})
    book.add(step, made)
    book.add_rounded(exam, step, made)


def test_what_broke_a_sample_is_judged_again_in_8_bits() -> None:
    """Samples 1 and 2 are broken by 10.4 and 10.7 of 255; an image file would hold 10, right again, and 11."""
    exam, book = edge_book(Linf(1 / 255))
    tried(exam, book, ALONE, [10.4, 10.7])
    assert book.flags["alone"].tolist() == [True, False, False]
    assert book.rounded.tolist() == [True, True, False]


def test_rounding_takes_as_many_at_a_time_as_fit() -> None:
    exam, book = edge_book(Linf(1 / 255))
    exam.batch_size = 1
    tried(exam, book, ALONE, [10.4, 10.7])
    assert book.rounded.tolist() == [True, True, False]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_rounding_asks_every_attack_that_broke_a_sample(order: tuple[int, int]) -> None:
    """Each leaves one sample standing, and not the same: nobody stands, whichever came first."""
    exam, book = edge_book(Linf(1 / 255))
    levels = [[10.4, 10.7], [10.7, 10.4]]
    for step, number in zip((ALONE, OTHER), order, strict=True):
        tried(exam, book, step, levels[number])
    assert book.rounded.tolist() == [True, False, False]


def test_what_rounding_puts_outside_the_ball_breaks_nobody() -> None:
    """Within 0.8 of 255 no other level lies: 10.7 would be 11, but is 10 where it must stay in the ball."""
    exam, book = edge_book(Linf(0.8 / 255))
    tried(exam, book, ALONE, [10.7, 10.7])
    assert book.rounded.tolist() == [True, True, True]


@pytest.mark.parametrize("threat", [Linf(3 / 255), L2(0.05)])
def test_8_bits_are_the_nearest_within_the_ball(threat: Threat) -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (40, 3, 4, 4), generator=gen) / 255
    delta = threat.project(torch.randn(x.shape, generator=gen))
    x_adv = (x + delta).clamp(0, 1)
    found, inside = in_8_bits(x_adv, x, threat)
    assert inside.all()
    assert ((255 * found).round() / 255 == found).all()
    assert (255 * (found - x_adv)).abs().max() < 1.001, "towards x at most one level"
    assert (threat.size(found - x) <= threat.eps + 1e-6).all()
    nearest = (255 * x_adv).round() / 255
    fits = threat.size(nearest - x) <= threat.eps + 1e-6
    assert torch.equal(found[fits], nearest[fits])
    assert fits.all() == (threat.norm == "linf"), "levels of Linf balls around images are never left; those of L2 are"
    assert torch.equal(in_8_bits(x, x, threat)[0], x)


def test_an_image_of_no_8_bits_may_have_none_in_its_ball() -> None:
    x = torch.full((1, 2), 10.5 / 255)
    found, inside = in_8_bits(x, x, Linf(0.1 / 255))
    assert not inside
    assert found.shape == x.shape


def test_samples_for_deep_checks_are_right_and_spread() -> None:
    book = tally()
    assert book.first_rows(3).tolist() == [0, 2, 4]
    assert book.first_rows(100).tolist() == [0, 1, 2, 3, 4]
    wrong = Tally(torch.ones(2, dtype=torch.int64), torch.tensor([[1.0, 0.0]] * 2), torch.tensor([-1.0, -1.0]), None)
    assert wrong.first_rows(3).tolist() == []
