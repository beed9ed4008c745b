"""Models that answer at random: the majority of votes decides, verdicts are fresh draws, all of it can be repeated."""

from __future__ import annotations

import json
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crew_cases import Noisy
from interrupted import Ends
from scipy.stats import binom
from torch import Tensor, nn

from flatrock.attacks.pgd import classified_right
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.records import Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import Linf
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.votes import check_votes, majority


class Coin(nn.Module):
    """Right by x[:, 0] > 0.5, but with probability p per draw and sample it says the other class."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.asked = p, 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += 1
        lead = x[:, 0] - 0.5
        lead = torch.where(torch.rand(len(x)) < self.p, -lead, lead)
        return torch.stack([-lead, lead], 1)


def coins(n: int) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 2
    return torch.stack([0.2 + 0.6 * y, torch.full((n,), 0.5)], 1), y


# The oracle


@pytest.mark.parametrize("votes", [1, 15])
@pytest.mark.parametrize("p", [0.1, 0.4, 0.7])
def test_a_sample_is_wrong_as_often_as_a_majority_of_coins(votes: int, p: float) -> None:
    """P(more than half of `votes` draws wrong) is a tail of the binomial, clean, and again under an attack."""
    n, wrong = 4000, float(binom.sf(votes // 2, votes, p))
    result = evaluate(Coin(p), *coins(n), Linf(0.01), attacks=["fgsm"], votes=votes)
    stands = {"clean": 1 - wrong, "fgsm": (1 - wrong) ** 2}  # the ball is far too small to matter
    for name, share in stands.items():
        assert abs(result.after[name] - share) <= 4 * sqrt(share * (1 - share) / n), name


def test_the_median_answer_is_right_exactly_if_most_are() -> None:
    """Of answers with ties, infinities and NaN too."""
    drawn = torch.randint(-1, 2, (7, 400, 3), generator=Seed(0).generator()).double()
    drawn[0, ::5], drawn[1, ::7, 0], drawn[2, 3] = torch.nan, torch.inf, -torch.inf
    y = torch.arange(400) % 3
    said = iter(drawn)
    chosen = majority(lambda: next(said), y, 7)
    most = torch.stack([classified_right(answer, y) for answer in drawn]).sum(0) > 3
    assert 0 < int(most.sum()) < 400
    assert torch.equal(classified_right(chosen, y), most)
    assert bool(torch.isclose(drawn, chosen, equal_nan=True).all(2).any(0).all()), "it is one of the answers"


# Who answers the same each time


@pytest.mark.parametrize("votes", [3, np.int64(5)])
def test_votes_change_nothing_for_a_model_that_answers_the_same(
    votes: int, digits: Any, digits_model: nn.Module
) -> None:
    asked: dict[str, Any] = {"attacks": ["pgd-5", "fast", "fab:steps=3"], "keep_adversarial": True, "doubt": True}
    one, several = (
        evaluate(digits_model, digits.test_x[:16], digits.test_y[:16], Linf(0.1), **asked, votes=v) for v in (1, votes)
    )
    for name in ("flags", "margins", "distances"):
        first, second = getattr(one, name), getattr(several, name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[k], second[k]) for k in first), name
    assert one.adversarial is not None and several.adversarial is not None
    assert torch.equal(one.adversarial, several.adversarial)
    assert one.rounded is not None and several.rounded is not None
    assert torch.equal(one.rounded, several.rounded)
    assert one.findings == several.findings
    more = several.costs["pgd-5"]["forwards"] - one.costs["pgd-5"]["forwards"]
    assert more == (votes - 1) * one.costs["pgd-5"]["samples"]
    assert several.costs["pgd-5"]["backwards"] == one.costs["pgd-5"]["backwards"], "samples leave early all the same"
    assert several.provenance["votes"] == votes
    assert "votes" not in one.provenance


# How attacks and verdicts draw


class Recorder(nn.Module):
    """Keeps the noise of every pass, and whether it was climbed."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []
        self.climbed: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        self.drawn.append(noise.detach())
        self.climbed.append(len(x) if x.requires_grad else 0)
        lead = (x + 0.3 * noise)[:, 0] - 0.5
        return torch.stack([-lead, lead], 1)


@pytest.mark.parametrize("votes", [1, 3])
@pytest.mark.parametrize("attack", ["fgsm", "fab:steps=2"])
def test_no_verdict_sees_the_noise_that_an_attack_has_seen(attack: str, votes: int) -> None:
    model = Recorder()
    evaluate(model, *coins(6), Linf(0.05), attacks=[attack], votes=votes)
    seen = {noise.numpy().tobytes() for noise in model.drawn}
    assert len(model.drawn) > 3
    assert len(seen) == len(model.drawn)


def climbed(votes: int) -> tuple[list[int], Result]:
    """Rows of the passes that PGD climbed, after the two of a doubt."""
    model = Recorder()
    result = evaluate(model, *coins(64), Linf(0.05), attacks=["pgd-6"], votes=votes)
    return [rows for rows in model.climbed if rows][2:], result


def test_one_unlucky_draw_ends_no_attack_where_a_majority_decides() -> None:
    one, result = climbed(1)
    assert all(b <= a for a, b in pairwise(one))
    assert one[-1] < one[0], "one draw decides: samples leave"
    several, result = climbed(15)
    assert several == [int(result.costs["pgd-6"]["samples"])] * 6


def ask(**options: Any) -> Result:
    x = torch.rand(24, 2, generator=Seed(1).generator())
    with kept_global_rng():  # layers are made with numbers of torch
        model, y = Noisy(), Noisy(0.0)(x).argmax(1)
    asked: dict[str, Any] = {"attacks": ["pgd-3", "fast", "fab:steps=2"], "batch_size": 5, "votes": 3}
    return evaluate(model, x, y, Linf(0.1), keep_adversarial=True, **{**asked, **options})


def alike(a: Result, b: Result) -> bool:
    assert a.adversarial is not None and b.adversarial is not None
    flags = all(torch.equal(a.flags[k], b.flags[k]) for k in a.flags)
    margins = all(torch.equal(a.margins[k], b.margins[k]) for k in a.margins)
    return flags and margins and torch.equal(a.adversarial, b.adversarial)


@pytest.mark.parametrize("votes", [1, 3])
def test_the_seed_decides_the_model_s_own_numbers_which_are_given_back(votes: int) -> None:
    found = []
    for state in (5, 6):
        with kept_global_rng(seed=Seed(state)):
            before = torch.get_rng_state()
            found.append(ask(votes=votes))
            assert torch.equal(torch.get_rng_state(), before)
    assert "E05" in {f.code for f in found[0].findings}
    assert alike(*found)
    assert not alike(found[0], ask(votes=votes, seed=1))


def test_two_devices_draw_what_one_does() -> None:
    assert alike(ask(), ask(device=["cpu", "cpu"]))


def test_resumed_it_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        ask(journal=tmp_path / "j", progress=Ends(7, KeyboardInterrupt))
    assert alike(ask(), ask(journal=tmp_path / "j", resume=True))


# Refusals


def test_another_number_of_votes_is_another_question(tmp_path: Path) -> None:
    asked = {n: ask(votes=n, journal=tmp_path / f"j{n}").provenance["question"] for n in (1, 3, 5)}
    assert len(set(asked.values())) == 3
    assert "votes" not in json.loads((tmp_path / "j1/exam.json").read_text()), "as before there were votes"
    for mine, theirs in ((1, 3), (3, 1), (3, 5)):
        with pytest.raises(StateError, match=r"another evaluation \(different: votes\)"):
            ask(votes=theirs, journal=tmp_path / f"j{mine}", resume=True)


@pytest.mark.parametrize("votes", [0, -1, 2, 1.0, 2.5, True, "3", None])
def test_votes_without_a_majority_are_refused_before_the_model_is_asked(votes: Any) -> None:
    model = Coin(0.1)
    with pytest.raises(ConfigError, match=r"votes must be an odd number >= 1.*got") as caught:
        evaluate(model, *coins(4), Linf(0.1), attacks=["fgsm"], votes=votes)
    assert model.asked == 0
    assert ("use 3" in str(caught.value)) == (votes == 2)


def test_votes_are_whole_numbers() -> None:
    assert [check_votes(v) for v in (1, 15, np.int64(3))] == [1, 15, 3]
    assert type(check_votes(np.int64(3))) is int
