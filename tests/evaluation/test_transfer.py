"""Inputs crafted on a surrogate: which attacks, at what cost, resumable, and which surrogates are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import Ends, Killed
from torch import Tensor, nn

from flatrock.attacks.catalog import parse_attack
from flatrock.attacks.craft import craft
from flatrock.attacks.transfer import Transfer
from flatrock.core.errors import ConfigError, ModelError, StateError
from flatrock.core.records import Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.tensorfile import weights_digest
from flatrock.core.threat import Linf
from flatrock.evaluation.evaluate import evaluate
from flatrock.evaluation.plans import described, make_plan, with_transfer

THREAT = Linf(0.06)


class Net(nn.Module):
    """A small network of any number of classes; remembers how many rows passed with and without gradient."""

    def __init__(self, seed: int = 0, *, classes: int = 4, size: int = 6) -> None:
        super().__init__()
        with kept_global_rng(seed=Seed(0).child("net")):
            self.first, self.last = nn.Linear(size, 24), nn.Linear(24, classes, bias=False)
        with kept_global_rng(seed=Seed(seed).child("shift")), torch.no_grad():
            self.first.weight.mul_(3).add_(0.6 * torch.randn_like(self.first.weight))
            self.first.bias.copy_(-self.first.weight.sum(1) / 2)  # centred, so that it answers with every class
        self.rows: list[int] = []
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        logits: Tensor = self.last(self.first(x).tanh())
        return logits


def question(n: int = 40) -> dict[str, Any]:
    """Two relatives; the model is wrong on every fifth sample."""
    x = torch.rand(n, 6, generator=Seed(1).generator())
    y = Net()(x).argmax(1).detach()
    y[::5] = (y[::5] + 1) % 4
    return {"model": Net(), "x": x, "y": y, "threat": THREAT, "surrogate": Net(1)}


def test_two_attacks_are_added_and_judged_on_the_model() -> None:
    asked = question()
    result = evaluate(**asked, attacks=["pgd-5"], batch_size=9)
    assert list(result.flags) == ["clean", "pgd-5", "transfer-pgd-20", "transfer-cw-20"]
    rows = result.flags["clean"].nonzero().squeeze(1)
    for name in ("pgd-20", "cw-20"):
        _, by = parse_attack(name)
        gen = Seed(0).child("evaluate").child(f"transfer-{name}").samples(rows)
        x_adv = craft(by, Net(1), asked["x"][rows], asked["y"][rows], THREAT, gen)
        assert torch.equal(result.flags[f"transfer-{name}"][rows], Net()(x_adv).argmax(1) == asked["y"][rows])
    assert result.per_attack["pgd-5"] < result.per_attack["transfer-pgd-20"] < result.clean
    assert result.robust <= min(result.per_attack.values())


def test_passes_are_those_of_the_surrogate_and_the_model_is_asked_for_the_verdict_alone() -> None:
    asked = question()
    result = evaluate(**asked, attacks=["transfer-pgd-5"])
    assert result.costs["transfer-pgd-5"] | {"seconds": 0} == {
        **{"samples": 32, "broken": result.costs["transfer-pgd-5"]["broken"], "seconds": 0},
        **{"forwards": 5 * 32 + 32, "backwards": 5 * 32},
    }
    assert result.costs["transfer-pgd-5"]["broken"] > 0
    assert asked["surrogate"].rows == [2, *[32] * 5], "two rows to see whether it fits, and every step in full"
    assert asked["model"].rows == [40, 40, 40, 40, 32, int(result.costs["transfer-pgd-5"]["broken"])], (
        "a clean pass, three to doubt it, the verdict, and the verdict on what was rounded"
    )


def test_both_networks_are_given_back_as_they_were() -> None:
    asked = question()
    asked["surrogate"].train()
    before = weights_digest(asked["surrogate"])
    evaluate(**asked, attacks=["fgsm"])
    assert all(m.training for m in asked["surrogate"].modules())
    assert all(p.requires_grad and p.grad is None for p in asked["surrogate"].parameters())
    assert weights_digest(asked["surrogate"]) == before


def test_half_precision_of_the_model_is_no_matter_of_the_surrogate() -> None:
    asked = question()
    full = evaluate(**asked, attacks=["transfer-pgd-5"], precision="full")
    half = evaluate(**asked, attacks=["transfer-pgd-5"], precision="half")
    assert half.provenance["precision"].startswith("float16")
    assert torch.equal(half.flags["transfer-pgd-5"], full.flags["transfer-pgd-5"])
    assert half.costs["transfer-pgd-5"]["forwards"] == full.costs["transfer-pgd-5"]["forwards"]


def test_targets_side_by_side_keep_to_the_batch_size() -> None:
    asked = question()
    evaluate(**asked, attacks=["transfer-apgd-t:steps=2:loss=margin"], batch_size=5)
    assert max(asked["surrogate"].rows) <= 10


# Names


def test_named_transfers_replace_the_two() -> None:
    listed = ["pgd-5", "transfer-mt-3", {"name": "transfer-pgd", "steps": 2}, {"name": "transfer-cw", "label": "mine"}]
    steps = make_plan(with_transfer(listed, like=listed), surrogate=Net(1))
    assert [s.label for s in steps] == ["pgd-5", "transfer-mt-3", "transfer-pgd-2", "mine"]
    assert [isinstance(s.attack, Transfer) for s in steps] == [False, True, True, True]


@pytest.mark.parametrize(
    ("like", "added"),
    [
        (["fgsm", "pgd-20"], ""),
        (["autoattack"], ""),
        (["fgsm", "pgd-10:step_size=0.003", "cw-20:step_size=0.25"], ":step_size=0.003"),
        ([{"name": "cw", "steps": 20, "step_size": "1/4"}], ":step_size=0.25"),
    ],
)
def test_the_step_size_is_that_of_the_other_attacks(like: list[Any], added: str) -> None:
    assert with_transfer("fgsm", like=like) == ["fgsm", f"transfer-pgd-20{added}", f"transfer-cw-20{added}"]


def test_a_transfer_is_described_by_the_attack_behind_it() -> None:
    (step,) = make_plan(["transfer-pgd-3"], surrogate=Net(1))
    told = described(step.attack, THREAT)
    assert told["kind"] == "Transfer"
    assert (told["by"]["kind"], told["by"]["steps"], told["by"]["step_size"]) == ("GradientAttack", 3, 0.015)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("transfr-pgd-20", r"unknown attack or plan 'transfr-pgd'.*did you mean 'transfer-pgd'"),
        ("transfer-pdg-20", r"unknown attack 'pdg'.*did you mean 'pgd'"),
        ("transfer-", "unknown attack ''"),
        ("transfer-pgd-20:step=3", "unknown option of attack 'pgd': 'step'"),
        ("transfer-autoattack", "a plan is not transferred as a whole; name an attack"),
        ("transfer-langevin:project=never", "leaves the ball"),
        ({"name": "transfer-pdg"}, r"unknown attack 'pdg'.*did you mean 'pgd'"),
    ],
)
def test_typos(name: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_plan([name], surrogate=Net(1))


def test_a_transfer_without_surrogate() -> None:
    with pytest.raises(ConfigError, match=r"'transfer-pgd-20': needs a surrogate.*give --surrogate RUN"):
        evaluate(**{**question(), "surrogate": None}, attacks=["transfer-pgd-20"])


# Refusals


class Defended(Net):
    """The weights of Net, behind noise and rounding; `through`: with a gradient as if nothing were rounded."""

    def __init__(self, noise: float = 0.0, *, levels: int = 0, through: bool = False) -> None:
        super().__init__()
        self.noise, self.levels, self.through = noise, levels, through

    def forward(self, x: Tensor) -> Tensor:
        if self.levels:
            rounded = (self.levels * x).round() / self.levels
            x = x + (rounded - x).detach() if self.through else rounded
        return super().forward(x + self.noise * torch.randn_like(x))


@pytest.mark.parametrize(
    ("surrogate", "kind", "said"),
    [
        (Net(1, classes=5), ModelError, "the surrogate has 5 classes, the model 4"),
        (Net(1, classes=2), ModelError, "surrogate: labels span"),
        (
            Net(1, size=7),
            ModelError,
            r"surrogate: the model fails on inputs of shape \(2, 6\), torch.float32 on cpu: RuntimeError: mat1",
        ),
        (Net(1).double(), ModelError, "surrogate: the model has torch.float64 weights"),
        (nn.Flatten(0), ModelError, "surrogate: the model must return logits of shape"),
        (len, ModelError, "surrogate: model must be a torch.nn.Module"),
        (Net(), ConfigError, "the surrogate has the model's own weights, answers and gradients, so nothing is transf"),
        (nn.Sequential(Net()), ConfigError, "the surrogate has the model's own weights"),
        (Defended(), ConfigError, "the surrogate has the model's own weights"),
    ],
)
def test_surrogates_that_do_not_fit(surrogate: Any, kind: type[Exception], said: str) -> None:
    asked = question()
    asked["y"][:2] = 3  # a label that two classes do not have
    with pytest.raises(kind, match=said):
        evaluate(**{**asked, "surrogate": surrogate}, attacks=["fgsm"])


def test_the_model_itself_is_refused_and_a_relative_is_not() -> None:
    asked = question()
    with pytest.raises(ConfigError, match="model's own weights"):
        evaluate(**{**asked, "surrogate": asked["model"]}, attacks=["fgsm"])
    assert "transfer-pgd-2" in evaluate(**{**asked, "surrogate": Net(1)}, attacks=["transfer-pgd-2"]).flags


@pytest.mark.parametrize(
    ("model", "surrogate"),
    [
        (Defended(0.1), Defended()),
        (Defended(levels=8), Defended(levels=8, through=True)),
        (Defended(levels=8), Defended()),
    ],
    ids=["without noise", "through rounding", "without rounding"],
)
def test_a_defence_is_attacked_on_its_own_network_without_it(model: nn.Module, surrogate: nn.Module) -> None:
    asked = {**question(), "model": model.eval(), "surrogate": surrogate.eval()}
    result = evaluate(**asked, attacks=["transfer-pgd-5"])
    assert result.per_attack["transfer-pgd-5"] < result.clean
    with pytest.raises(ConfigError, match="model's own weights"):
        evaluate(**{**asked, "surrogate": model}, attacks=["transfer-pgd-5"])


@pytest.mark.parametrize("model", [Defended(0.1), Defended(levels=8), nn.Sequential(Defended())])
def test_a_copy_of_the_model_is_no_surrogate(model: nn.Module) -> None:
    """One that answers at random neither, though its draws are its own."""
    asked = {**question(), "model": model.eval()}
    for same in (copy.deepcopy(model), nn.Sequential(copy.deepcopy(model)).eval()):
        with pytest.raises(ConfigError, match="model's own weights"):
            evaluate(**{**asked, "surrogate": same}, attacks=["transfer-pgd-5"])


# Records


def test_the_surrogate_is_in_the_provenance_and_survives_json() -> None:
    asked = question()
    told = {"surrogate": {"recipe": "other"}, "recipe": "mine"}
    result = evaluate(**asked, attacks=["transfer-pgd-2"], provenance=told)
    assert result.provenance["surrogate"] == {"recipe": "other", "weights": weights_digest(Net(1))}
    again = Result.from_json(result.to_json())
    assert again.provenance == result.provenance
    assert again.attacks["transfer-pgd-2"]["by"]["steps"] == 2
    assert "surrogate" not in evaluate(**{**asked, "surrogate": None}, attacks=["fgsm"]).provenance


@pytest.mark.parametrize("after", [1, 4, 7])
def test_a_killed_evaluation_goes_on(tmp_path: Path, after: int) -> None:
    options: dict[str, Any] = {"attacks": ["fgsm", "transfer-pgd-3", "transfer-cw-3"], "batch_size": 11}
    whole = evaluate(**question(), **options, keep_adversarial=True)
    with pytest.raises(Killed):
        evaluate(**question(), **options, journal=tmp_path / "j", progress=Ends(after))
    resumed = evaluate(**question(), **options, journal=tmp_path / "j", resume=True, keep_adversarial=True)
    assert all(torch.equal(resumed.flags[k], whole.flags[k]) for k in whole.flags)
    assert resumed.adversarial is not None
    assert whole.adversarial is not None
    assert torch.equal(resumed.adversarial, whole.adversarial)
    assert [{**c, "seconds": 0} for c in resumed.costs.values()] == [{**c, "seconds": 0} for c in whole.costs.values()]


def test_another_surrogate_is_another_question(tmp_path: Path) -> None:
    asked = {**question(), "attacks": ["transfer-pgd-2"], "journal": tmp_path / "j"}
    evaluate(**asked)
    evaluate(**asked, resume=True)
    with pytest.raises(StateError, match=r"\(different: surrogate\)"):
        evaluate(**{**asked, "surrogate": Net(2)}, resume=True)
