"""Plans: what is in them, who sees what, and what stands in for losses that few classes do not define."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.attacks.boundary import TargetedBoundary
from flatrock.attacks.square import Square
from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.records import Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.plans import PLANS, Step, make_plan, substitutes


def labels(name: str, classes: int | None = 10) -> list[str]:
    return [step.label for step in make_plan([name], classes=classes)]


def test_the_standard_plan_has_the_official_attacks_order_and_constants() -> None:
    steps = make_plan(["autoattack"], classes=10)
    assert [s.label for s in steps] == [f"autoattack/{n}" for n in ("apgd-ce", "apgd-t", "fab-t", "square")]
    ce, targeted, fab, square = (s.attack for s in steps)
    assert (ce.loss, ce.steps, ce.restarts) == ("ce", 100, 1)  # type: ignore[attr-defined]
    assert (targeted.loss, targeted.targets, targeted.steps, targeted.restarts) == ("dlr", 9, 100, 1)  # type: ignore[attr-defined]
    assert isinstance(fab, TargetedBoundary)
    assert (fab.targets, fab.steps, fab.restarts) == (9, 100, 1)
    assert isinstance(square, Square)
    assert (square.queries, square.p_init, square.restarts) == (5000, 0.8, 1)


def test_the_other_plans() -> None:
    plus = make_plan(["autoattack-plus"], classes=10)
    order = ["apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"]
    assert [s.label.rpartition("/")[2] for s in plus] == order
    assert [getattr(s.attack, "restarts", 1) for s in plus] == [5, 5, 5, 1, 1, 1]
    rand = make_plan(["autoattack-rand"], classes=10)
    assert [(s.label.rpartition("/")[2], s.attack.eot) for s in rand] == [("apgd-ce", 20), ("apgd-dlr", 20)]  # type: ignore[attr-defined]
    assert labels("fast") == ["fast/apgd-ce", "fast/apgd-t"]
    assert "not AutoAttack" in PLANS["fast"][1]


@pytest.mark.parametrize(
    ("plan", "classes", "said"),
    [
        ("autoattack", 10, []),
        ("autoattack", 4, []),
        ("autoattack", 3, ["targeted margin"]),
        ("autoattack", 2, ["targeted margin"]),
        ("fast", 2, ["targeted margin"]),
        ("autoattack-rand", 3, []),
        ("autoattack-rand", 2, ["the margin instead of the DLR"]),
        ("autoattack-plus", 2, ["targeted margin", "the margin instead of the DLR"]),
    ],
)
def test_few_classes_are_told(plan: str, classes: int, said: list[str]) -> None:
    found = substitutes(make_plan([plan], classes=classes), classes)
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))


@pytest.mark.parametrize(("label", "said"), [(None, "pgd-2"), ("", "pgd-2"), ("mine", "mine")])
def test_a_label_that_says_nothing_is_none(label: str | None, said: str) -> None:
    (step,) = make_plan([{"name": "pgd", "steps": 2, "label": label}])
    assert step.label == said


def test_typos_name_attacks_and_plans() -> None:
    with pytest.raises(ConfigError, match=r"unknown attack or plan 'autoatack'.*did you mean 'autoattack'"):
        make_plan(["autoatack"])
    with pytest.raises(ConfigError, match="label 'autoattack' is taken"):
        make_plan(["autoattack", "autoattack"])


@pytest.mark.parametrize(
    "spec", ["autoattack:steps=5", "fast-20", {"name": "autoattack", "steps": 5}, {"name": "autoattack"}], ids=str
)
def test_a_plan_takes_no_options(spec: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"a plan takes no options; write '(autoattack|fast)' alone, or name an attack"
    ):
        make_plan([spec])


def test_a_transferred_plan_with_options_is_a_plan_too() -> None:
    with pytest.raises(ConfigError, match="a plan is not transferred as a whole"):
        make_plan(["transfer-autoattack:steps=5"], surrogate=nn.Flatten())


def net(classes: int, shape: tuple[int, ...]) -> nn.Module:
    size = int(torch.tensor(shape).prod())
    with kept_global_rng(seed=Seed(0).child("net")):
        return nn.Sequential(nn.Flatten(), nn.Linear(size, 16), nn.Tanh(), nn.Linear(16, classes)).eval()


def question(classes: int, shape: tuple[int, ...], n: int = 24) -> tuple[nn.Module, Tensor, Tensor]:
    model = net(classes, shape)
    x = torch.rand(n, *shape, generator=Seed(1).generator())
    with torch.no_grad():
        y = model(x).argmax(1)
    y[0] = (y[0] + 1) % classes
    return model, x, y


SHORT = [
    {"name": "apgd-ce", "steps": 5},
    {"name": "fab-t", "steps": 5},
    {"name": "square", "queries": 40},
]


@pytest.fixture
def short_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """autoattack with few steps: the way through the plan is what is looked at."""

    def members(classes: int | None) -> list[tuple[str, dict[str, object]]]:
        loss = {} if classes is None or classes >= 4 else {"loss": "margin"}
        first, *rest = [(str(s["name"]), {k: v for k, v in s.items() if k != "name"}) for s in SHORT]
        return [first, ("apgd-t", {"steps": 5, **loss}), *rest]

    monkeypatch.setitem(PLANS, "autoattack", (members, "short"))


@pytest.mark.parametrize("threat", [Linf(0.02), L2(0.1)], ids=["linf", "l2"])
@pytest.mark.parametrize(("classes", "shape"), [(10, (3, 8, 8)), (4, (1, 6, 6)), (3, (5,)), (2, (2,)), (2, (1, 4, 7))])
def test_any_class_count_and_shape(short_plan: None, classes: int, shape: tuple[int, ...], threat: Linf | L2) -> None:
    model, x, y = question(classes, shape)
    result = evaluate(model, x, y, threat, attacks=["autoattack", "pgd-5"], batch_size=10, keep_adversarial=True)
    assert list(result.plans) == ["autoattack"]
    stages = [result.flags[label] for label in result.plans["autoattack"]]
    for before, after in zip([result.flags["clean"], *stages], stages, strict=False):
        assert bool((after <= before).all()), "what is broken stays broken"
    assert result.per_attack.keys() == {"autoattack", "pgd-5"}
    assert torch.equal(result.worst, stages[-1] & result.flags["pgd-5"])
    assert [f.code for f in result.findings if f.code == "E12"] == (["E12"] if classes < 4 else [])
    again = Result.from_json(result.to_json())
    assert again.per_attack == result.per_attack
    assert again.plans == result.plans


def test_survivors_alone_are_attacked_further(short_plan: None) -> None:
    model, x, y = question(10, (3, 8, 8))
    result = evaluate(model, x, y, Linf(0.02), attacks=["autoattack"])
    standing = int(result.flags["clean"].sum())
    for label in result.plans["autoattack"]:
        assert result.costs[label]["samples"] == standing
        standing -= int(result.costs[label]["broken"])
        assert int(result.flags[label].sum()) == standing


@pytest.mark.parametrize("sets", ["one", "all wrong", "none standing"])
def test_small_and_hopeless_sets(short_plan: None, sets: str) -> None:
    model, x, y = question(10, (3, 8, 8))
    if sets == "one":
        x, y = x[1:2], y[1:2]
    elif sets == "all wrong":
        y = (y + 3) % 10
        with torch.no_grad():
            y = torch.where(model(x).argmax(1) == y, (y + 1) % 10, y)
    eps = 0.9 if sets == "none standing" else 0.02
    result = evaluate(model, x, y, Linf(eps), attacks=["autoattack"])
    assert result.n == len(x)
    if sets != "one":
        assert result.robust == 0
    if sets == "all wrong":
        assert all(cost["samples"] == 0 for cost in result.costs.values())


class Small(nn.Module):
    """A model whose device holds only so many rows."""

    def __init__(self, inner: nn.Module, most: int, error: RuntimeError) -> None:
        super().__init__()
        self.inner, self.most, self.error, self.refused = inner, most, error, 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            self.refused += 1
            raise self.error
        logits: Tensor = self.inner(x)
        return logits


# What torch says when the CPU's memory is short; test_smoothing.py sees to it that it does.
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError(CPU)], ids=["cuda", "cpu"])
def test_a_batch_that_does_not_fit_is_halved_for_good(error: RuntimeError) -> None:
    model, x, y = question(10, (3, 8, 8))
    small = Small(model, 7, error)
    result = evaluate(small, x, y, Linf(0.02), attacks=["fgsm", "pgd-5"], batch_size=24)
    assert result.provenance["batch_size"] == 6
    assert small.refused == 2, "24 and 12 did not fit, 6 did"
    plain = evaluate(model, x, y, Linf(0.02), attacks=["fgsm", "pgd-5"], batch_size=6)
    assert all(torch.equal(result.flags[k], plain.flags[k]) for k in plain.flags)
    with pytest.raises(type(error)) as caught:
        evaluate(Small(model, 0, error), x, y, Linf(0.02), attacks=["fgsm"])
    assert caught.value is error, "nothing is said about the shape of inputs"


class Climbs(nn.Module):
    """Too many rows at once for a backward pass, and no others, fail as if the CPU's memory were short."""

    def __init__(self, inner: nn.Module, most: int) -> None:
        super().__init__()
        self.inner, self.most = inner, most

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)
        if logits.requires_grad and len(x) > self.most:
            logits.register_hook(self._full)  # type: ignore[no-untyped-call]
        return logits

    def _full(self, grad: Tensor) -> Tensor:
        raise RuntimeError(CPU)


def test_a_backward_pass_that_does_not_fit_halves_batches_too() -> None:
    model, x, y = question(10, (3, 8, 8))
    result = evaluate(Climbs(model, 7).eval(), x, y, Linf(0.02), attacks=["pgd-5"], batch_size=24)
    assert result.provenance["batch_size"] == 6
    assert result.findings == evaluate(model, x, y, Linf(0.02), attacks=["pgd-5"]).findings


def test_other_failures_are_not_taken_for_want_of_memory() -> None:
    model, x, y = question(10, (3, 8, 8))
    small = Small(model, 7, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(ModelError, match=r"fails on inputs of shape.*cannot be multiplied"):
        evaluate(small, x, y, Linf(0.02), attacks=["fgsm"])
    assert small.refused == 1


def test_a_step_knows_its_plan() -> None:
    assert make_plan(["pgd-5"])[0].plan is None
    assert isinstance(make_plan(["fast"])[0], Step)
    assert make_plan(["fast"])[0].plan == "fast"
