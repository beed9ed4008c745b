"""Attacks that seek the nearest adversarial point, on their own: distances that a second pass confirms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_cases import exact_radius, linear_case
from interrupted import Ends, Killed
from torch import Tensor, nn

from flatrock.attacks.boundary import FastAdaptiveBoundary, TargetedBoundary
from flatrock.attacks.gradient import GradientAttack
from flatrock.attacks.nearest import Reached, seeker
from flatrock.attacks.rays import RayS
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.records import Result
from flatrock.core.rng import Seed
from flatrock.core.threat import L2, Linf, Threat
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.exam import Exam
from flatrock.evaluation.fast_model import Counted
from flatrock.evaluation.plans import PLANS

RAYS = "rays:queries=300"
FAB = "fab-t:steps=5"


def question(threat: Threat | None = None, *, n: int = 30, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """A linear model whose distances are known; every fifth label is wrong, and half of the rest can be broken."""
    model, x, y = linear_case(6, 4, n=n, dtype=dtype)
    if threat is None:
        threat = Linf(float(exact_radius(model, x, y, "linf").median()))
    wrong = y.clone()
    wrong[::5] = (wrong[::5] + 1) % 4
    return {"model": model, "x": x, "y": wrong, "threat": threat}


def radii(asked: dict[str, Any]) -> Tensor:
    right = asked["model"](asked["x"]).argmax(1) == asked["y"]
    return torch.where(right, exact_radius(asked["model"], asked["x"], asked["y"], asked["threat"].norm), 0).detach()


@pytest.mark.parametrize("threat", [Linf(0.05), L2(0.1)], ids=["linf", "l2"])
@pytest.mark.parametrize("attack", ["fab:steps=5", FAB])
def test_fab_finds_the_distance_of_a_linear_model(threat: Threat, attack: str) -> None:
    asked = question(threat)
    result = evaluate(**asked, attacks=[attack])
    found, exact = result.distances[attack], radii(asked)
    assert found.dtype == torch.float64
    assert torch.allclose(found, exact, rtol=0.06)  # it overshoots by 5 %
    assert bool((found >= exact - 1e-12).all())
    assert result.mean_distance[attack] == pytest.approx(float(found.mean()))
    assert result.unreached == {attack: 0}


def test_rays_finds_the_distance_of_a_linear_model_and_its_mean_is_adbd() -> None:
    asked = question()
    result = evaluate(**asked, attacks=["rays:queries=2000"])
    found, exact = result.distances["rays:queries=2000"], radii(asked)
    assert torch.allclose(found, exact, atol=2e-3)
    assert result.mean_distance["rays:queries=2000"] == pytest.approx(float(found.mean()))
    assert int((found == 0).sum()) == 6, "the samples that are wrong anyway count, with distance 0"


@pytest.mark.parametrize("attack", ["rays:queries=80", FAB])
def test_flags_follow_from_distances_and_the_batch_size_changes_neither(attack: str) -> None:
    asked = question()
    whole = evaluate(**asked, attacks=[attack], keep_adversarial=True)
    assert torch.equal(whole.flags[attack], whole.distances[attack] > asked["threat"].eps)
    assert 0 < whole.robust < whole.clean
    assert whole.adversarial is not None
    broken = whole.flags["clean"] & ~whole.flags[attack]
    size = asked["threat"].size(whole.adversarial - asked["x"])
    assert torch.allclose(size[broken], whole.distances[attack][broken], atol=1e-12)
    assert bool((size[~broken] == 0).all())
    for batch_size in (1, 11):
        part = evaluate(**asked, attacks=[attack], batch_size=batch_size)
        assert torch.allclose(part.distances[attack], whole.distances[attack], atol=1e-9, rtol=0.011)
        assert torch.equal(part.flags[attack], whole.flags[attack])


def test_the_whole_budget_is_spent_on_its_own_and_not_in_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANS, "fast", (lambda classes: [("rays", {"queries": 300}), ("fab-t", {"steps": 5})], "short"))
    asked = question(Linf(0.3))
    result = evaluate(**asked, attacks=[RAYS, FAB, "fast"])
    assert list(result.distances) == [RAYS, FAB]
    alone, planned = result.costs[RAYS], result.costs["fast/rays"]
    assert alone["queries"] == 300 * alone["samples"]
    assert result.costs[FAB]["queries"] == TargetedBoundary(steps=5).passes(4) * result.costs[FAB]["samples"]
    assert alone["forwards"] >= alone["queries"] + alone["samples"], "the verdict is counted beside"
    assert "queries" not in planned
    assert planned["forwards"] < alone["forwards"] / 2
    assert torch.equal(result.flags["fast/rays"], result.flags[RAYS])


def test_other_attacks_measure_nothing() -> None:
    result = evaluate(**question(), attacks=["fgsm", "pgd-3", "square:queries=10"])
    assert (result.distances, result.mean_distance, result.unreached) == ({}, {}, {})
    assert all("queries" not in cost for cost in result.costs.values())


def test_rays_in_l2_says_what_it_always_says() -> None:
    with pytest.raises(ConfigError, match="attack 'rays' measures linf distances, got l2"):
        evaluate(**question(L2(0.1)), attacks=[RAYS])


class Deaf(nn.Module):
    """Says class 0 to every input, and has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([1 + x.sum(1) * 1e-3, x.sum(1) * 0], 1)


@pytest.mark.parametrize("attack", ["rays:queries=50", "fab-t:steps=2"])
def test_where_nothing_is_found_the_distance_is_infinite_and_left_out_of_the_mean(attack: str) -> None:
    x, y = torch.full((4, 3), 0.5), torch.tensor([0, 0, 0, 1])
    result = evaluate(Deaf(), x, y, Linf(0.1), attacks=[attack])
    assert result.distances[attack].tolist() == [torch.inf] * 3 + [0.0]
    assert result.mean_distance == {attack: 0.0}
    assert result.unreached == {attack: 3}
    assert result.flags[attack].tolist() == [True] * 3 + [False]
    none = evaluate(Deaf(), x[:3], y[:3], Linf(0.1), attacks=[attack])
    assert none.mean_distance == {attack: None}
    again = Result.from_json(none.to_json())
    assert again.distances[attack].tolist() == [torch.inf] * 3
    assert (again.mean_distance, again.unreached) == (none.mean_distance, none.unreached)


def test_half_precision_does_not_measure() -> None:
    """The nearest points lie where rounding decides, so the model itself is asked."""
    asked = question(dtype=torch.float32)
    half = evaluate(**asked, attacks=[FAB], precision="half")
    assert half.provenance["precision"].startswith("float16")
    full = evaluate(**asked, attacks=[FAB], precision="full")
    assert torch.equal(half.distances[FAB], full.distances[FAB])


def test_every_wrong_and_single_samples() -> None:
    asked = question()
    asked["y"] = (asked["model"](asked["x"]).argmax(1) + 1) % 4
    result = evaluate(**asked, attacks=[RAYS, "pgd-2"])
    assert result.distances[RAYS].tolist() == [0.0] * 30
    assert result.mean_distance == {RAYS: 0.0}
    one = question()
    assert evaluate(**{**one, "x": one["x"][1:2], "y": one["y"][1:2]}, attacks=[FAB]).distances[FAB].shape == (1,)


# Confirmation


class Step(nn.Module):
    """Class 1 above 0.5."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), x - 0.5], 1)


@pytest.mark.parametrize(
    ("claimed", "distance", "right"),
    [(0.5001, 0.1001, False), (0.49999, 0.09999 * 1.001, False), (0.4992, 0.0992 * 1.01, False)],
)
def test_a_point_that_rounding_undid_is_moved_outwards(claimed: float, distance: float, right: bool) -> None:
    tried = measured(claimed, eps=0.2)
    assert tried.distances is not None
    assert float(tried.distances) == pytest.approx(distance, abs=1e-9)
    assert bool(tried.logits.argmax(1) == 0) is right
    assert float(tried.x_adv) == pytest.approx(0.4 + distance)


def test_a_point_no_pass_confirms_is_none() -> None:
    tried = measured(0.45, eps=0.2)
    assert tried.distances is not None
    assert float(tried.distances) == torch.inf
    assert float(tried.x_adv) == 0.4


def test_a_confirmed_point_beyond_the_ball_breaks_nobody() -> None:
    tried = measured(0.6, eps=0.1)
    assert tried.distances is not None
    assert float(tried.distances) == pytest.approx(0.2)
    assert float(tried.x_adv) == 0.4
    assert bool(tried.logits.argmax(1) == 0)


def measured(claimed: float, *, eps: float) -> Any:
    """An attack that claims this point for the input 0.4."""
    x, y = torch.tensor([[0.4]], dtype=torch.float64), torch.tensor([0])
    exam = Exam(Step(), Counted(Step()), x, y, Linf(eps), torch.device("cpu"), 1, Seed(0))

    def seek(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: Any) -> Reached:
        return Reached(torch.full_like(x, claimed), torch.tensor([claimed - 0.4], dtype=torch.float64))

    return exam._measured(seek, x, y, Seed(0).samples(torch.arange(1)))


def test_who_measures() -> None:
    for attack in (FastAdaptiveBoundary(), TargetedBoundary()):
        assert seeker(attack, Linf(0.1)) is not None
        assert seeker(attack, L2(0.1)) is not None
    assert seeker(RayS(), Linf(0.1)) is not None
    assert seeker(RayS(), L2(0.1)) is None
    assert seeker(GradientAttack(), Linf(0.1)) is None


# On disk


@pytest.mark.parametrize("after", [1, 3, 5])
def test_distances_of_a_killed_evaluation_come_back_bit_by_bit(tmp_path: Path, after: int) -> None:
    options: dict[str, Any] = {"attacks": [FAB, RAYS, "pgd-2"], "batch_size": 9}
    whole = evaluate(**question(), **options)
    with pytest.raises(Killed):
        evaluate(**question(), **options, journal=tmp_path / "j", progress=Ends(after))
    resumed = evaluate(**question(), **options, journal=tmp_path / "j", resume=True)
    assert list(resumed.distances) == [FAB, RAYS]
    for name in (FAB, RAYS):
        assert torch.equal(resumed.distances[name], whole.distances[name])
        assert resumed.costs[name]["queries"] == whole.costs[name]["queries"]
    assert all(torch.equal(resumed.flags[k], whole.flags[k]) for k in whole.flags)


def test_json_holds_every_distance_exactly() -> None:
    result = evaluate(**question(dtype=torch.float32), attacks=[FAB, RAYS])
    again = Result.from_json(result.to_json())
    assert all(torch.equal(again.distances[k], result.distances[k]) for k in (FAB, RAYS))
    assert again.mean_distance == result.mean_distance
    assert json.loads(result.to_json())["mean_distance"] == result.mean_distance


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("mean_distance", {FAB: 0.5}, "do not follow"),
        ("unreached", {FAB: 1}, "do not follow"),
        ("distances", {}, "do not follow"),
        ("distances", {FAB: [0.1]}, "1 distances for 30 samples"),
        ("distances", {"pgd": [0.1] * 30}, "evaluate again"),
        ("distances", {FAB: ["far"] * 30}, "not a flatrock result"),
    ],
)
def test_damaged_distances_are_refused(key: str, value: Any, said: str) -> None:
    d = json.loads(evaluate(**question(), attacks=[FAB]).to_json())
    with pytest.raises(StateError, match=said):
        Result.from_json(json.dumps({**d, key: value}))


def test_distances_that_contradict_the_flags_are_refused() -> None:
    d = json.loads(evaluate(**question(), attacks=[FAB]).to_json())
    far = d["distances"][FAB]
    # Swapped, so that the mean stays.
    low, high = far.index(min(v for v in far if v)), far.index(max(far))
    far[low], far[high] = far[high], far[low]
    with pytest.raises(StateError, match="its distances do not agree with its flags"):
        Result.from_json(json.dumps(d))
