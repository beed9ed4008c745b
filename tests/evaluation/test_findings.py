"""The doubts an evaluation raises about itself, the plan of attacks it follows, and the record it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, ModelError, ThreatError
from flatrock.core.provenance import VERSION
from flatrock.core.records import Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf
from flatrock.evaluation.checks import TEST_SELECTED
from flatrock.evaluation.evaluate import evaluate, make_plan

THREAT = Linf(0.03)
PLAN = ["fgsm", "pgd-5", "cw-5", "mt-3"]


def net(ending: nn.Module | None = None) -> nn.Sequential:
    """A small random network in float64 and eval mode, with anything at its end."""
    with kept_global_rng(seed=Seed(0).child("net")):
        body = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 4)).double().eval()
    grey = torch.full((1, 12), 0.5, dtype=torch.float64)
    body[3].bias.data -= body(grey)[0].detach()  # no class is the favourite
    return nn.Sequential(*body, ending or nn.Identity()).eval()


def data(n: int = 90) -> tuple[Tensor, Tensor]:
    """Inputs and labels, two thirds of them the network's own answers."""
    x = torch.rand(n, 12, generator=Seed(1).generator(), dtype=torch.float64)
    y = net()(x).detach().argmax(1)
    y[::3] = (y[::3] + 1) % 4
    return x, y


# Findings


def codes(result: Result) -> list[str]:
    return [finding.code for finding in result.findings]


def test_a_sound_evaluation_has_no_findings() -> None:
    x, y = data(9)
    assert codes(evaluate(net(), x, y, THREAT, attacks=["fgsm"])) == []


@pytest.mark.parametrize("part", ["all", "body"])
def test_e01_a_model_in_train_mode(part: str) -> None:
    x, y = data(9)
    model = net()
    (model if part == "all" else model[1]).train()
    result = evaluate(model, x, y, THREAT, attacks=["fgsm"])
    assert codes(result) == ["E01"]
    assert "model.eval()" in result.findings[0].cure
    assert torch.equal(result.flags["clean"], evaluate(net(), x, y, THREAT, attacks=["fgsm"]).flags["clean"])


@pytest.mark.parametrize("batch_size", [4, 100])
def test_e02_a_model_that_returns_probabilities(batch_size: int) -> None:
    x, y = data(30)
    result = evaluate(net(nn.Softmax(1)), x, y, THREAT, attacks=["fgsm"], batch_size=batch_size)
    assert codes(result) == ["E02"]
    assert "softmax" in result.findings[0].cure


class Later(nn.Module):
    """Logits in the first batch, probabilities from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, z: Tensor) -> Tensor:
        self.calls += 1
        return z if self.calls == 1 else z.softmax(1)


@pytest.mark.parametrize(("samples", "found"), [(30, ["E02"]), (9, [])])
def test_e02_a_model_that_returns_the_outputs_of_a_sigmoid(samples: int, found: list[str]) -> None:
    """They need not sum to 1. Logits of few samples may lie in [0, 1] by chance."""
    x, y = data(samples)
    result = evaluate(net(nn.Sigmoid()), x, y, THREAT, attacks=["fgsm"])
    assert codes(result) == found
    assert all("sigmoid" in finding.cure for finding in result.findings)


@pytest.mark.parametrize("ending", [lambda: nn.LogSoftmax(1), nn.Tanh, Later])
@pytest.mark.parametrize("batch_size", [10, 100])
def test_e02_is_not_raised_by_other_outputs(ending: Callable[[], nn.Module], batch_size: int) -> None:
    x, y = data(30)
    found = codes(evaluate(net(ending()), x, y, THREAT, attacks=["fgsm"], batch_size=batch_size))
    assert found == (["E05"] if ending is Later else []), "one that changes its mind is doubted for that"


def test_e03_weights_chosen_on_the_test_set() -> None:
    x, y = data(9)
    result = evaluate(net(), x, y, THREAT, attacks=["fgsm"], marks=(TEST_SELECTED,))
    assert codes(result) == ["E03"]
    assert result.marks == (TEST_SELECTED,)
    assert "held_out" in result.findings[0].cure
    assert codes(evaluate(net(), x, y, THREAT, attacks=["fgsm"], marks=("something-else",))) == []


def test_findings_add_up() -> None:
    x, y = data(9)
    model = net(nn.Softmax(1)).train()
    assert codes(evaluate(model, x, y, THREAT, attacks=["fgsm"], marks=(TEST_SELECTED,))) == ["E01", "E03", "E02"]


# The plan


def test_all_faults_of_a_plan_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(["pgd-20", "pdg-20", "pgd-20:step=3", {"name": "cw", "steps": -1}, 7])  # type: ignore[list-item]
    text = str(caught.value)
    assert len(caught.value.faults) == 4
    for part in (
        "'pdg-20'",
        "did you mean 'pgd'",
        "'step'",
        "did you mean 'steps'",
        "steps must be a whole number",
        "7",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("attacks", "label"),
    [
        (["pgd-20", "pgd-20"], "pgd-20"),
        (["pgd-20", {"name": "pgd", "steps": 20}], "pgd-20"),
        (["pgd-20:restarts=5", {"name": "pgd", "steps": 20, "restarts": 5}], "pgd-20:restarts=5"),
        ([{"name": "fgsm", "label": "clean"}], "clean"),
        (["fast", {"name": "pgd", "label": "fast/apgd-ce"}], "fast/apgd-ce"),
        ([{"name": "pgd", "label": "fast/apgd-t"}, "fast"], "fast/apgd-t"),
    ],
)
def test_labels_are_given_once(attacks: list[Any], label: str) -> None:
    with pytest.raises(
        ConfigError, match=f"attack label '{label}' is taken; leave one of the two out, or in Python and in recipes"
    ):
        make_plan(attacks)


def test_a_label_of_its_own_tells_two_attacks_apart() -> None:
    plan = make_plan(["pgd-20", {"name": "pgd", "steps": 20, "restarts": 5, "label": "pgd-20 x5"}])
    assert [step.label for step in plan] == ["pgd-20", "pgd-20 x5"]


def test_a_fault_in_the_plan_comes_before_any_work() -> None:
    x, y = data(9)
    calls: list[int] = []
    model = net()
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ConfigError):
        evaluate(model, x, y, THREAT, attacks=["pgd-5", "pdg-5"])
    assert calls == []


# Record keeping


def test_costs_are_recorded() -> None:
    x, y = data()
    result = evaluate(net(), x, y, THREAT, attacks=PLAN)
    assert set(result.costs) == set(PLAN)
    for cost in result.costs.values():
        assert cost["samples"] == 60
        assert cost["seconds"] > 0


def test_provenance_and_threat_are_recorded() -> None:
    x, y = data(9)
    result = evaluate(net(), x, y, L2(0.5), attacks=["fgsm"], seed=11, batch_size=3, provenance={"recipe": "abc"})
    assert result.threat == {"norm": "l2", "eps": 0.5}
    born = dict(result.provenance)
    assert {"flatrock", "commit", "torch", "python", "device", "seed", "time", "batch_size", "recipe"} <= set(born)
    assert (born["flatrock"], born["torch"]) == (VERSION, torch.__version__)
    assert (born["seed"], born["batch_size"], born["recipe"]) == (11, 3, "abc")


def test_a_result_survives_json() -> None:
    x, y = data()
    result = evaluate(net(nn.Softmax(1)), x, y, THREAT, attacks=PLAN, marks=(TEST_SELECTED,))
    again = Result.from_json(result.to_json())
    assert all(torch.equal(again.flags[k], result.flags[k]) for k in result.flags)
    assert again.findings == result.findings
    assert again.robust == result.robust


class Listener:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.told.append(("begin", total))

    def advance(self, units: int, note: str = "") -> None:
        self.told.append((units, note))

    def end(self) -> None:
        self.told.append("end")

    def say(self, text: str) -> None:
        raise AssertionError(text)


def test_progress_adds_up() -> None:
    x, y = data()
    listener = Listener()
    evaluate(net(), x, y, THREAT, attacks=["fgsm", "pgd-2"], batch_size=25, progress=listener)
    told = [t if isinstance(t, str) or t[0] == "begin" else t[0] for t in listener.told]
    assert told == 2 * [("begin", 60), 25, 25, 10, "end"]
    assert all("% stand" in t[1] for t in listener.told if isinstance(t, tuple) and t[0] != "begin")


class Overflows(nn.Module):
    """Right on clean inputs near 0.5, without an answer 0.1 away from there."""

    def forward(self, x: Tensor) -> Tensor:
        away = ((x.flatten(1) - 0.5).abs().amax(1, keepdim=True) > 0.1).to(x.dtype)
        return torch.cat([x.flatten(1).sum(1, keepdim=True), -x.flatten(1)[:, :2]], 1) / (1 - away) + 0 / (1 - away)


@pytest.mark.parametrize("attack", ["fgsm", "pgd-3", "cw-3", "mt-2"])
def test_a_model_without_an_answer_is_not_robust(attack: str) -> None:
    """argmax of a row of NaN is class 0, the true class here: counting it as right would be a lie."""
    x, y = torch.full((6, 4), 0.5), torch.zeros(6, dtype=torch.int64)
    result = evaluate(Overflows().eval(), x, y, Linf(0.2), attacks=[attack])
    assert (result.clean, result.robust) == (1.0, 0.0)
    assert [f.code for f in result.findings] == ["E04"]
    assert "6 samples" in result.findings[0].message
    calm = evaluate(Overflows().eval(), x, y, Linf(0.05), attacks=[attack])
    assert (calm.robust, calm.findings) == (1.0, ())


def test_marks_of_a_model_are_the_marks_of_its_numbers() -> None:
    model = net()
    x, y = data(9)
    model.marks = (TEST_SELECTED,)  # type: ignore[assignment]
    result = evaluate(model, x, y, THREAT, attacks=["fgsm"])
    assert result.marks == (TEST_SELECTED,)
    assert [f.code for f in result.findings] == ["E03"]


def test_the_result_says_what_each_attack_was() -> None:
    x, y = data(9)
    result = evaluate(net(), x, y, THREAT, attacks=["pgd-5", {"name": "pgd", "steps": 5, "step_size": 0.001}])
    assert list(result.per_attack) == ["pgd-5", "pgd-5:step_size=0.001"]
    assert result.attacks["pgd-5"]["step_size"] == THREAT.eps / 4
    assert result.attacks["pgd-5:step_size=0.001"]["step_size"] == 0.001
    assert Result.from_json(result.to_json()).attacks == result.attacks


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [[0.5]]}, ThreatError, "inputs must be a torch tensor, got list"),
        ({"y": [0]}, ThreatError, "labels must be a torch tensor, got list"),
        ({"model": lambda x: x}, ModelError, "must be a torch.nn.Module"),
        ({"x": torch.rand(90, 12)}, ModelError, "float64 weights but the inputs are torch.float32"),
        ({"device": "gpu"}, ConfigError, "unknown device 'gpu'"),
        ({"batch_size": 2.0}, ConfigError, "batch_size must be at least 1, got 2.0"),
        ({"attacks": None}, ConfigError, "attacks must be a list of names"),
        ({"attacks": []}, ConfigError, "name at least one"),
    ],
)
def test_careless_calls_are_answered_in_words(change: dict[str, Any], error: type[Exception], message: str) -> None:
    x, y = data(90)
    call: dict[str, Any] = {"model": net(), "x": x, "y": y, "threat": THREAT, "attacks": ["fgsm"], **change}
    with pytest.raises(error, match=message):
        evaluate(**call)


def test_inference_mode_is_named() -> None:
    x, y = data(9)
    with torch.inference_mode(), pytest.raises(ModelError, match="inference_mode"):
        evaluate(net(), x, y, THREAT, attacks=["fgsm"])


def test_a_numpy_seed_is_recorded_as_a_number() -> None:
    import numpy as np

    x, y = data(9)
    result = evaluate(net(), x, y, THREAT, attacks=["pgd-2"], seed=np.int64(3))  # type: ignore[arg-type]
    assert Result.from_json(result.to_json()).provenance["seed"] == 3


@pytest.mark.parametrize("spec", ["pgd-0", "cw-0", "mt-0", "pgd-0:restarts=2"])
def test_e17_an_attack_that_makes_no_step(spec: str) -> None:
    x, y = data(9)
    result = evaluate(net(), x, y, THREAT, attacks=["fgsm", spec])
    assert codes(result) == ["E17"]
    assert "no gradient step is made by " + spec.split(":")[0] in result.findings[0].message
    assert codes(evaluate(net(), x, y, THREAT, attacks=["fgsm", spec.replace("-0", "-1")])) == []


def test_e17_behind_a_transfer() -> None:
    x, y = data(9)
    result = evaluate(net(), x, y, THREAT, attacks=["fgsm", "transfer-pgd-0"], surrogate=nn.Linear(12, 4).double())
    assert [f.message.split(":")[0] for f in result.findings] == ["no gradient step is made by transfer-pgd-0"]
