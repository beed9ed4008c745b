"""What an evaluation says: who survives what, in any batch, at what cost, and with which doubts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, ModelError, ThreatError
from flatrock.core.neighbours import Lookout
from flatrock.core.records import Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import L2, Linf
from flatrock.evaluation.evaluate import DEFAULT_ATTACKS, evaluate

# The package has a function of the same name.
evaluate_module = importlib.import_module("flatrock.evaluation.evaluate")


class Net(nn.Module):
    """A small random network in float64; optionally watched or made to end in a softmax."""

    def __init__(self, ending: nn.Module | None = None) -> None:
        super().__init__()
        with kept_global_rng(seed=Seed(0).child("net")):
            self.body = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 4)).double()
        self.ending = ending or nn.Identity()
        self.rows: list[int] = []
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        logits: Tensor = self.ending(4 * self.body(x))
        return logits


def data(n: int = 90) -> tuple[Tensor, Tensor]:
    """Inputs and labels, two thirds of them the network's own answers."""
    x = torch.rand(n, 12, generator=Seed(1).generator(), dtype=torch.float64)
    y = Net()(x).detach().argmax(1)
    y[::3] = (y[::3] + 1) % 4
    return x, y


THREAT = Linf(0.03)
PLAN = ["fgsm", "pgd-5", "cw-5", "mt-3"]


def flags_equal(a: Result, b: Result) -> bool:
    return a.flags.keys() == b.flags.keys() and all(torch.equal(a.flags[k], b.flags[k]) for k in a.flags)


# What the numbers mean


def test_robust_is_the_worst_case_of_each_sample() -> None:
    x, y = data()
    result = evaluate(Net(), x, y, THREAT, attacks=PLAN)
    flags = result.flags
    assert list(flags) == ["clean", *PLAN]
    assert all(flag.shape == (90,) and flag.dtype == torch.bool for flag in flags.values())
    by_hand = [all(bool(flags[k][i]) for k in flags) for i in range(90)]
    assert result.worst.tolist() == by_hand
    assert result.robust == sum(by_hand) / 90
    assert result.robust <= min(result.per_attack.values()) < max(result.per_attack.values()) < result.clean


class Looks(Lookout):
    """Sees these numbers of processes, one after the other, while it looks."""

    numbers: ClassVar[list[int | None]]
    looks = False

    def __enter__(self) -> Looks:
        self.looks = True
        return self

    def seen(self) -> int | None:
        return self.numbers.pop(0) if self.looks and self.numbers else None


@pytest.mark.parametrize(
    ("seen", "told"), [([None, 2], 2), ([3, 0, None], 3), ([0], 0), ([None], "nothing"), ([], "nothing")]
)
def test_a_result_tells_who_else_had_the_gpu_open(
    monkeypatch: pytest.MonkeyPatch, seen: list[int | None], told: int | str
) -> None:
    """The most there were; nothing of that where nobody can look, as on a CPU."""
    monkeypatch.setattr(evaluate_module, "Lookout", Looks)
    monkeypatch.setattr(Looks, "numbers", seen, raising=False)
    x, y = data(6)
    result = evaluate(Net(), x, y, THREAT, attacks=["fgsm"])
    assert result.provenance.get("neighbours", "nothing") == told


def test_a_resumed_result_tells_who_was_there_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its seconds are those of both processes, so its neighbours are, too."""
    monkeypatch.setattr(evaluate_module, "Lookout", Looks)
    monkeypatch.setattr(Looks, "numbers", [2], raising=False)
    x, y = data(30)
    asked: dict[str, Any] = {"attacks": ["fgsm", "pgd-3"], "batch_size": 8, "journal": tmp_path / "part"}
    evaluate(Net(), x, y, THREAT, **asked)
    last = max((tmp_path / "part").glob("chunk-*"))
    last.unlink()
    Looks.numbers = [0]
    resumed = evaluate(Net(), x, y, THREAT, resume=True, **asked)
    assert resumed.provenance["neighbours"] == 2


def test_clean_accuracy_is_that_of_a_plain_pass() -> None:
    x, y = data()
    right = Net()(x).argmax(1) == y
    result = evaluate(Net(), x, y, THREAT, attacks=["fgsm"])
    assert torch.equal(result.flags["clean"], right)
    assert result.clean == float(right.double().mean()) == 60 / 90


def test_misclassified_samples_count_as_broken_and_cost_nothing() -> None:
    x, y = data()
    model = Net()
    result = evaluate(model, x, y, Linf(0.0), attacks=["pgd-5"])
    assert result.robust == result.clean == 60 / 90
    assert not bool(result.flags["pgd-5"][::3].any())
    assert model.rows == [90, 90, 90, *[60] * 5, 60], (
        "a clean pass and two to doubt the model, five steps and the verdict on the 60 that were right"
    )


def test_each_attack_is_judged_on_its_own() -> None:
    x, y = data()
    together = evaluate(Net(), x, y, THREAT, attacks=PLAN)
    backwards = evaluate(Net(), x, y, THREAT, attacks=PLAN[::-1])
    for name in PLAN:
        alone = evaluate(Net(), x, y, THREAT, attacks=[name])
        assert torch.equal(alone.flags[name], together.flags[name])
        assert torch.equal(backwards.flags[name], together.flags[name])
    assert backwards.robust == together.robust


@pytest.mark.parametrize("threat", [Linf(0.03), L2(0.15)], ids=["linf", "l2"])
def test_verdicts_do_not_depend_on_the_batch_size(threat: Linf | L2) -> None:
    x, y = data()
    plan = ["fgsm", "pgd-5:restarts=2", "cw-5", "kl-pgd-5", "mt-3"]
    whole = evaluate(Net(), x, y, threat, attacks=plan, batch_size=1000)
    assert 0 < whole.robust < whole.clean
    for size in (1, 7, 64):
        assert flags_equal(evaluate(Net(), x, y, threat, attacks=plan, batch_size=size), whole)


def test_the_labels_are_kept_as_they_were() -> None:
    x, y = data()
    given = y.clone()
    result = evaluate(Net(), x, given, THREAT, attacks=["fgsm"])
    given.zero_()
    assert result.labels is not None
    assert torch.equal(result.labels, y)
    parts = result.by_class
    assert list(parts) == sorted(set(y.tolist()))
    assert sum(part.n for part in parts.values()) == 90
    assert sum(part.n * part.robust for part in parts.values()) == pytest.approx(90 * result.robust, abs=1e-9)
    assert torch.equal(Result.from_json(result.to_json()).labels, y)  # type: ignore[arg-type]


def test_random_numbers_belong_to_ids_in_any_order_and_any_part() -> None:
    x, y = data()
    wide = Linf(0.4)  # so small a step hardly moves a random start
    plan = ["pgd-1:step_size=1/255", "kl-pgd-2"]
    whole = evaluate(Net(), x, y, wide, attacks=plan)
    assert whole.ids is None
    part = torch.randperm(90, generator=Seed(2).generator())[:60]
    same = evaluate(Net(), x[part], y[part], wide, attacks=plan, ids=part)
    assert all(torch.equal(same.flags[k], whole.flags[k][part]) for k in whole.flags)
    assert torch.equal(Result.from_json(same.to_json()).ids, part)  # type: ignore[arg-type]
    others = evaluate(Net(), x[part], y[part], wide, attacks=plan)
    assert any(not torch.equal(others.flags[k], whole.flags[k][part]) for k in whole.flags)
    assert evaluate(Net(), x, y, wide, attacks=["fgsm"], ids=torch.arange(90)).ids is None


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.arange(89), r"ids must be 90 integers, one per sample, got torch.int64 \[89\]"),
        (torch.arange(90.0), r"got torch.float32 \[90\]"),
        (list(range(90)), "got list"),
        (torch.zeros(90, dtype=torch.int64), "ids must differ"),
    ],
    ids=["short", "float", "list", "same"],
)
def test_ids_are_one_integer_each(ids: Any, words: str) -> None:
    x, y = data()
    with pytest.raises(ThreatError, match=words):
        evaluate(Net(), x, y, THREAT, attacks=["fgsm"], ids=ids)


def test_seeds_reproduce_and_differ() -> None:
    x, y = data()

    def run(seed: int) -> Result:
        return evaluate(Net(), x, y, THREAT, attacks=["pgd-1:step_size=1/255", "kl-pgd-2"], seed=seed)

    assert flags_equal(run(3), run(3))
    assert any(not flags_equal(run(3), run(seed)) for seed in (4, 5, 6))


def test_text_and_mapping_name_the_same_attack() -> None:
    x, y = data()
    text = evaluate(Net(), x, y, THREAT, attacks=["pgd-5"])
    mapping = evaluate(Net(), x, y, THREAT, attacks=[{"name": "pgd", "steps": 5}])
    assert flags_equal(text, mapping)


def test_one_attack_may_be_given_as_bare_text() -> None:
    x, y = data()
    assert list(evaluate(Net(), x, y, THREAT, attacks="pgd-5").flags) == ["clean", "pgd-5"]


def test_default_attacks() -> None:
    x, y = data(9)
    assert list(evaluate(Net(), x, y, THREAT).flags) == ["clean", *DEFAULT_ATTACKS]


def test_the_verdict_is_a_pass_over_what_the_attack_returned() -> None:
    """A model that answers differently when gradients are asked for is judged without them."""

    class TwoFaced(Net):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return logits.roll(1, 1) if torch.is_grad_enabled() else logits

    x, y = data()
    y = Net()(x).detach().argmax(1)
    assert evaluate(TwoFaced(), x, y, Linf(0.0), attacks=["pgd-3"]).robust == 1


# Sizes at the edge


def test_one_sample() -> None:
    x, y = data()
    result = evaluate(Net(), x[1:2], y[1:2], THREAT, attacks=PLAN)
    assert result.n == 1
    assert result.clean == 1


class Viewer(Net):
    """Flattens with view(n, -1), which torch refuses for an empty batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(x.shape[0], -1))


@pytest.mark.parametrize("name", ["fgsm", "pgd-3", "kl-pgd-3", "mt-3"])
@pytest.mark.parametrize("make", [Net, Viewer])
def test_nothing_right_means_nothing_to_attack(make: Callable[[], Net], name: str) -> None:
    x, _ = data()
    wrong = (Net()(x).detach().argmax(1) + 1) % 4
    model = make()
    result = evaluate(model, x, wrong, THREAT, attacks=[name])
    assert (result.clean, result.robust) == (0, 0)
    assert 0 not in model.rows
    assert result.costs[name]["samples"] == 0


@pytest.mark.parametrize("make", [Net, Viewer])
def test_all_broken_at_once(make: Callable[[], Net]) -> None:
    x, y = data()
    result = evaluate(make(), x, y, Linf(1.0), attacks=["pgd-20:step_size=0.5", "mt-5"])
    assert result.robust == 0
    assert result.clean > 0


def test_nothing_to_evaluate_is_an_error() -> None:
    with pytest.raises(ThreatError, match="nothing to evaluate: x has no samples"):
        evaluate(Net(), torch.zeros(0, 12), torch.zeros(0, dtype=torch.int64), THREAT)


@pytest.mark.parametrize("size", [0, -1])
def test_batches_have_at_least_one_sample(size: int) -> None:
    x, y = data(9)
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got"):
        evaluate(Net(), x, y, THREAT, batch_size=size)


# Where it runs


class Travelled(Net):
    """Notes where it is sent."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.fails = fails

    def to(self, *args: Any, **kwargs: Any) -> Travelled:
        self.sent.append(str(args[0]))
        return super().to(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("inside the model")
        return super().forward(x)


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_lent_to_a_device_is_brought_home(fails: bool) -> None:
    x, y = data(9)
    model = Travelled(fails=fails)
    model.sent.clear()
    if fails:
        with pytest.raises(ModelError, match="KeyError: 'inside the model'"):
            evaluate(model, x, y, THREAT, attacks=["fgsm"], device="cpu")
    else:
        evaluate(model, x, y, THREAT, attacks=["fgsm"], device="cpu")
    assert model.sent[0] == model.sent[-1] == "cpu"
    assert len(model.sent) == 2
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_model_without_tensors_is_evaluated_on_the_cpu() -> None:
    x = torch.rand(20, 4, generator=Seed(2).generator())
    result = evaluate(nn.Flatten(), x, x.argmax(1), Linf(0.05), attacks=["pgd-5"])
    assert result.clean == 1
    assert 0 < result.robust < 1


@pytest.mark.gpu
def test_the_gpu_finds_what_the_cpu_finds_and_the_model_comes_home() -> None:
    x, y = data()
    model = Net()
    on_gpu = evaluate(model, x, y, THREAT, attacks=PLAN, device="cuda")
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert flags_equal(on_gpu, evaluate(model, x, y, THREAT, attacks=PLAN))
