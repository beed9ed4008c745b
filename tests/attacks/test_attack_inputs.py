"""Inputs, labels, models and options that break the contract are refused in words a user can act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import ATTACKS, attack, parse_attack
from flatrock.attacks.craft import check_inputs, check_logits
from flatrock.attacks.gradient import FastGradientSign, GradientAttack, MultiTargeted
from flatrock.attacks.langevin import Langevin
from flatrock.core.errors import ConfigError, ModelError, ThreatError
from flatrock.core.records import Result
from flatrock.core.threat import L2, Linf
from flatrock.evaluation.evaluate import evaluate

X = torch.linspace(0, 1, 24).reshape(6, 4)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


class Answer(nn.Module):
    """Returns whatever a function makes of the input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def by_attack(model: nn.Module, x: Tensor, y: Tensor, threat: Any) -> object:
    return attack("pgd", model, x, y, threat, steps=2)


def by_evaluate(model: nn.Module, x: Tensor, y: Tensor, threat: Any) -> object:
    return evaluate(model, x, y, threat, attacks=["pgd-2"])


both_ways = pytest.mark.parametrize("go", [by_attack, by_evaluate])
Go = Callable[[nn.Module, Tensor, Tensor, Any], object]


@both_ways
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X * 255, r"inputs must lie in \[0, 1\], got \[0, 255\]; use x / 255"),
        ((X - 0.5) / 0.25, r"inputs must lie in \[0, 1\], got \[-2, 2\]; put normalisation inside the model"),
        (X * 255, r"inputs must lie in \[0, 1\], got \[0, 255\]"),
        (X - 1e-4, r"inputs must lie in \[0, 1\]"),
        (torch.where(X > 0.9, torch.nan, X), "NaN or infinity; clean the data"),
        (torch.where(X > 0.9, torch.inf, X), "NaN or infinity; clean the data"),
        (X - 2e-6, r"inputs must lie in \[0, 1\]"),
        (X + 2e-6, r"inputs must lie in \[0, 1\]"),
        ((X * 255).to(torch.uint8), r"inputs must be float32 or float64 .*got torch.uint8 .*; divide by 255: x.float"),
        (X[:, :0], r"inputs of shape \(6, 0\) hold no numbers"),
        (X.to_sparse(), r"inputs must be a dense tensor, got one of layout torch.sparse_coo; use x.to_dense\(\)"),
        (X[:, 0], r"inputs must be float32 or float64 \[n, ...\], got torch.float32 of shape \(6,\)"),
    ],
)
def test_inputs_outside_the_contract(go: Go, x: Tensor, message: str) -> None:
    with pytest.raises(ThreatError, match=message):
        go(nn.Linear(4, 3), x, Y, Linf(0.1))


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("off", [-2.98e-8, 1.2e-7, -9e-7, 9e-7])
def test_rounding_beside_the_box_is_clamped_in_a_copy(go: Go, off: float, dtype: torch.dtype) -> None:
    """A round trip through a normalisation leaves as much."""
    x = (X.to(dtype) + off).clone()
    given = x.clone()
    assert float(x.min()) < 0 or float(x.max()) > 1
    go(nn.Linear(4, 3).to(dtype), x, Y, Linf(0.1))
    inside = check_inputs(x, Y, Linf(0.1))
    assert torch.equal(inside, x.clamp(0, 1))
    assert torch.equal(x, given)


def test_inputs_in_the_box_are_not_copied() -> None:
    assert check_inputs(X, Y, Linf(0.1)).data_ptr() == X.data_ptr()


@both_ways
@pytest.mark.parametrize(
    ("y", "cure"),
    [
        (Y[:5], "give one label per input"),
        (Y[:5].float(), "give one label per input"),
        (Y[:, None], r"use y\.squeeze\(1\)"),
        (Y.float(), r"use y\.long\(\)"),
        (nn.functional.one_hot(Y), r"if they are one-hot, use y\.argmax\(1\)"),
        (nn.functional.one_hot(Y).float(), r"if they are one-hot, use y\.argmax\(1\)"),
        (torch.tensor(1), "give one label per input"),
    ],
    ids=["short", "short float", "column", "float", "one-hot", "soft", "scalar"],
)
def test_labels_of_the_wrong_shape_or_type(go: Go, y: Tensor, cure: str) -> None:
    with pytest.raises(ThreatError, match=rf"labels must be integers .* of shape \(6,\), got torch\..*; {cure}$"):
        go(nn.Linear(4, 3), X, y, Linf(0.1))


@both_ways
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_any_integer_type_work(go: Go, dtype: torch.dtype) -> None:
    net = nn.Linear(4, 3)
    found, wanted = go(net, X, Y.to(dtype), Linf(0.1)), go(net, X, Y, Linf(0.1))
    if isinstance(found, Result) and isinstance(wanted, Result):
        found, wanted = found.worst, wanted.worst
    assert isinstance(found, Tensor)
    assert isinstance(wanted, Tensor)
    assert torch.equal(found, wanted)


@both_ways
def test_truth_values_are_not_labels(go: Go) -> None:
    with pytest.raises(ThreatError, match="labels must be"):
        go(nn.Linear(4, 3), X, Y > 0, Linf(0.1))


@both_ways
@pytest.mark.parametrize(("label", "span"), [(3, "0..3"), (-1, "-1..2"), (7, "0..7")])
def test_labels_the_model_has_no_class_for(go: Go, label: int, span: str) -> None:
    y = Y.clone()
    y[3] = label
    with pytest.raises(
        ModelError, match=rf"labels span {span} but the model has 3 classes \(0..2\); check num_classes"
    ):
        go(nn.Linear(4, 3), X, y, Linf(0.1))


@both_ways
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.sum(1), r"must return logits of shape \(6, classes\), got \(6,\)"),
        (lambda x: x[:, :3, None], r"of shape \(6, classes\), got \(6, 3, 1\); let it return one row per input"),
        (lambda x: x[:2, :3], r"must return logits of shape \(6, classes\), got \(2, 3\)"),
        (lambda x: (x[:, :3], x), r"got tuple; let it return the logits alone, such as model\(x\)\[0\]"),
        (lambda x: x[:, :1], "one column; a classifier needs one logit per class"),
        (lambda x: x[:, :3] * torch.nan, "NaN or infinite logits on clean inputs"),
        (lambda x: x[:, :3] / 0, "NaN or infinite logits on clean inputs"),
    ],
    ids=["vector", "cube", "rows", "tuple", "column", "nan", "inf"],
)
def test_models_that_return_no_logits(go: Go, function: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        go(Answer(function), X, Y, Linf(0.1))


@both_ways
@pytest.mark.parametrize("threat", [0.1, "linf", None, Linf, (8 / 255,)])
def test_a_threat_must_be_a_threat(go: Go, threat: Any) -> None:
    with pytest.raises(ThreatError, match=r"threat must be flatrock.Linf\(eps\) or flatrock.L2\(eps\)"):
        go(nn.Linear(4, 3), X, Y, threat)


@both_ways
def test_a_radius_beyond_the_box_is_refused(go: Go) -> None:
    with pytest.raises(ThreatError, match=r"eps 2\.5 exceeds the diameter 2 of the input box; write 128/255"):
        go(nn.Linear(4, 3), X, Y, L2(2.5))
    go(nn.Linear(4, 3), X, Y, L2(2.0))


def test_check_logits_accepts_what_is_right() -> None:
    check_logits(torch.zeros(6, 3), X, Y)
    check_logits(torch.zeros(0, 3), X[:0], Y[:0])


# Options and names


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("pgd", GradientAttack()),
        ("pgd-20", GradientAttack(steps=20)),
        ("pgd-20:restarts=5:step_size=2/255", GradientAttack(steps=20, restarts=5, step_size=2 / 255)),
        ("pgd:steps=7:start=zero:loss=dlr", GradientAttack(steps=7, start="zero", loss="dlr")),
        ("cw-100", GradientAttack(steps=100, loss="cw")),
        ("kl-pgd", GradientAttack(loss="kl")),
        ("kl-pgd-10:noise=1e-2", GradientAttack(loss="kl", steps=10, noise=0.01)),
        ("fgsm", FastGradientSign()),
        ("mt-5", MultiTargeted(steps=5)),
        ("langevin-20:step_size=0.003", Langevin(steps=20, step_size=0.003)),
    ],
)
def test_attacks_by_text(spec: str, expected: object) -> None:
    assert parse_attack(spec) == (spec, expected)


def test_attacks_by_mapping() -> None:
    assert parse_attack({"name": "pgd", "steps": 20}) == ("pgd-20", GradientAttack(steps=20))
    assert parse_attack({"name": "fgsm"}) == ("fgsm", FastGradientSign())
    label, made = parse_attack({"name": "pgd", "label": "strong", "steps": "50", "step_size": "1/255"})
    assert (label, made) == ("strong", GradientAttack(steps=50, step_size=1 / 255))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pdg-20", "unknown attack 'pdg'; known: .*did you mean 'pgd'"),
        ("autoattack", "unknown attack 'autoattack'; known: .*cw, .*fgsm, .*kl-pgd, .*langevin, .*mt, .*pgd"),
        ("", "unknown attack ''"),
        ("pgd-20:restart=5", "'restart'; known: .*did you mean 'restarts'"),
        ("pgd-20:restarts", "expected option=value after ':', got 'restarts'"),
        ("pgd-20:steps=5", "gives the number of steps twice"),
        ("pgd-20:restarts=5:restarts=1", "gives restarts twice; keep one"),
        ("fgsm-3", "option of attack 'fgsm'"),
        ("cw-20:loss=ce", "option of attack 'cw': 'loss'"),
        ("pgd:loss=hinge", "unknown attack loss 'hinge'"),
        ("pgd:start=corner", "unknown start 'corner'; known: gaussian, uniform, wide, zero"),
        ("pgd:box=never", "unknown box 'never'; known: first, last"),
        ("pgd-0:start=wide", "start 'wide' lies outside of the ball until the first step; set steps to 1 or more"),
        ("pgd:step_size=2", r"step_size must lie in \(0, 1\] .*got 2; write 2/255"),
        ("pgd:step_size=0", "step_size must lie in"),
        ("pgd:step_size=-1/255", "step_size must lie in"),
        ("pgd:step_size=1/0", "step_size must lie in .*got '1/0'"),
        ("pgd:steps=2.5", "steps must be a whole number >= 0, got 2.5"),
        ("pgd:steps=-1", "steps must be a whole number >= 0, got -1"),
        ("pgd:steps=true", "steps must be a whole number >= 0, got True"),
        ("pgd:restarts=0", "restarts must be a whole number >= 1, got 0"),
        ("kl-pgd:start=zero", "zero gradient at the clean input"),
        ("mt:start=corner", "unknown start 'corner'"),
        ("mt:start=wide", "unknown start 'wide'; known: gaussian, uniform, zero"),
        ("mt:step_size=2", "step_size must lie in"),
        ("langevin-0", "langevin steps must be a whole number >= 1, got 0"),
        ("langevin:steps=1.5", "steps must be a whole number"),
        ("langevin:step_size=2", "step_size must lie in"),
        ("langevin:noise=-1", "langevin noise must be a number >= 0, got -1"),
        ("langevin:noise=abc", "langevin noise must be a number >= 0, got 'abc'"),
        ("langevin:gamma=-1", "langevin gamma must be a number >= 0, got -1"),
        ("langevin:average=0", r"langevin average must lie in \(0, 1\], got 0"),
        ("langevin:average=1.5", r"langevin average must lie in \(0, 1\], got 1.5"),
        ("langevin:start=edge", "unknown langevin start 'edge'; known: corner, gaussian, uniform, zero"),
        ("langevin:drift=raw", "unknown langevin drift 'raw'; known: code, paper"),
        ("langevin:project=first", "unknown langevin project 'first'; known: every, last, never"),
        (
            "langevin:project=never",
            "'langevin' leaves the ball with project=never, .*use project=last or project=every",
        ),
        ({"name": "langevin", "project": "never"}, "leaves the ball with project=never"),
        ({"steps": 20}, "unknown attack ''"),
        ({"name": "pgd", "stepsize": 0.1}, "did you mean 'step_size'"),
        (20, "named by text such as 'pgd-20' or by a mapping"),
    ],
)
def test_attacks_that_cannot_be(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_attack(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "pgd:step_size=abc",
        "pgd:step_size=nan",
        "pgd:step_size=true",
        "pgd:noise=abc",
        "pgd:noise=true",
        "mt:step_size=abc",
        {"name": "pgd", "step_size": [0.1]},
        {"name": "pgd", "noise": float("nan")},
        {"name": "pgd", "loss": ["ce"]},
    ],
)
def test_options_of_the_wrong_type_are_config_errors(spec: Any) -> None:
    with pytest.raises(ConfigError):
        parse_attack(spec)


def test_all_faults_of_one_attack_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        GradientAttack(steps=-1, restarts=0, step_size=5.0, start="corner")
    assert len(caught.value.faults) == 4


def test_attack_by_name_refuses_unknown_names_and_options() -> None:
    with pytest.raises(ConfigError, match="did you mean 'pgd'"):
        attack("pgdd", nn.Linear(4, 3), X, Y, Linf(0.1))
    with pytest.raises(ConfigError, match="'step'; known"):
        attack("pgd", nn.Linear(4, 3), X, Y, Linf(0.1), step=3)


def test_dlr_on_two_classes_says_what_to_use() -> None:
    with pytest.raises(ConfigError, match="'dlr' needs at least 3 classes, the model has 2; use 'cw'"):
        attack("pgd", nn.Linear(4, 2), X, Y.clamp(max=1), Linf(0.1), loss="dlr")


def test_every_attack_has_a_description() -> None:
    assert len(list(ATTACKS)) >= 5
    for entry in ATTACKS:
        assert entry.summary
        assert entry.cite
