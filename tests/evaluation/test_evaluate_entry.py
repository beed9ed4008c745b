"""What an evaluation checks, takes and refuses before its first attack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import flatrock
from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.progress import Silent
from flatrock.core.threat import L2, Linf, Threat
from flatrock.evaluation.checks import TEST_SELECTED
from flatrock.evaluation.evaluate import evaluate


class Watch(Silent):
    """Counts the attacks that were begun."""

    begun = 0

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.begun += 1


def samples() -> tuple[Tensor, Tensor]:
    return torch.rand(6, 5), torch.arange(6) % 3


@pytest.mark.parametrize(
    ("spec", "threat", "classes", "said"),
    [
        ("rays", L2(0.1), 3, "'rays' measures linf distances, got l2"),
        ("apgd-dlr", Linf(0.1), 2, "loss 'dlr' needs at least 3 classes, the model has 2"),
        ("pgd:loss=dlr", Linf(0.1), 2, "loss 'dlr' needs at least 3 classes, the model has 2"),
        ("apgd-t", Linf(0.1), 3, "loss 'targeted dlr' needs at least 4 classes, the model has 3; use loss 'margin'"),
        ("transfer-apgd-t", Linf(0.1), 3, "loss 'targeted dlr' needs at least 4 classes, the model has 3"),
    ],
)
def test_an_attack_that_cannot_work_is_refused_before_any_runs(
    spec: str, threat: Threat, classes: int, said: str
) -> None:
    model, watch, x = nn.Linear(5, classes), Watch(), torch.rand(4, 5)
    surrogate = nn.Linear(5, classes) if spec.startswith("transfer") else None
    with pytest.raises(ConfigError, match=f"'{spec}': .*{said}"):
        evaluate(
            model,
            x,
            model(x).argmax(1),
            threat,
            attacks=["pgd-3", spec],
            surrogate=surrogate,
            progress=watch,
        )
    assert watch.begun == 0


def test_square_is_refused_in_a_norm_it_does_not_know() -> None:
    class Other(Linf):
        norm = "l1"

    model, watch, x = nn.Linear(5, 3), Watch(), torch.rand(4, 5)
    with pytest.raises(ConfigError, match="'square' knows the norms linf and l2, got 'l1'"):
        evaluate(model, x, model(x).argmax(1), Other(0.1), attacks=["pgd-3", "square"], progress=watch)
    assert watch.begun == 0


class Opaque(nn.Linear):
    """A network without gradients w.r.t. its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


@pytest.mark.parametrize("spec", ["pgd-2", "fgsm", "mt", "langevin", "apgd-ce", "fab-t", "autoattack"])
def test_attacks_that_need_gradients_are_refused_before_any_runs(spec: str) -> None:
    model, watch, x = Opaque(5, 4), Watch(), torch.rand(4, 5)
    with pytest.raises(ModelError, match=rf"'{spec}.*' needs gradients, but the model's output has no gradient w\.r\."):
        evaluate(model, x, model(x).argmax(1), Linf(0.1), attacks=["square:queries=5", spec], progress=watch)
    assert watch.begun == 0


@pytest.mark.parametrize("spec", ["square:queries=5", "rays:queries=5", "pgd-0"])
def test_attacks_without_gradients_need_none(spec: str) -> None:
    model, x = Opaque(5, 3), torch.rand(4, 5)
    y = model(x).argmax(1)
    result = evaluate(model, x, y, Linf(0.1), attacks=[spec, "transfer-pgd-2"], surrogate=nn.Linear(5, 3))
    assert result.clean == 1


class Picky(nn.Linear):
    """A network of one batch size, flat everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 8
        return super().forward(0 * x)


def test_the_look_at_gradients_asks_no_batch_of_another_size() -> None:
    model, x = Picky(5, 3), torch.rand(8, 5)
    result = evaluate(model, x, model(x).argmax(1), Linf(0.1), attacks=["pgd-2"], batch_size=8)
    assert result.clean == 1
    assert "E06" in [finding.code for finding in result.findings]


class OnGrid(nn.Linear):
    """Answers inputs of two levels, and anything else in its own way.

    Most rows of the identity have another class than the corner of ones, so that attacks by labels leave the grid.
    """

    def __init__(self, *, columns: int = 0) -> None:
        super().__init__(5, 4)
        self.columns = columns
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.weight[0, 4:])

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == x.round()).all()):
            return super().forward(x)
        if not self.columns:
            raise ValueError("not on the grid")
        return super().forward(x)[:, :1].expand(-1, self.columns)


@pytest.mark.parametrize(
    "spec", ["fgsm", "pgd-2", "apgd-t:steps=2", "fab:steps=2", "square:queries=5", "rays:queries=9"]
)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            OnGrid(),
            r"fails on others of shape \(\d+, 5\), torch.float32 on cpu: ValueError: not on the grid; let it",
        ),
        (
            OnGrid(columns=2),
            r"has 4 classes on the clean inputs, but on \d+ others it gives logits of shape \(\d+, 2\)",
        ),
        (
            OnGrid(columns=9),
            r"has 4 classes on the clean inputs, but on \d+ others it gives logits of shape \(\d+, 9\)",
        ),
    ],
    ids=["raises", "fewer", "more"],
)
@pytest.mark.parametrize("doubt", [False, True])
def test_a_model_that_answers_clean_inputs_only(model: nn.Module, said: str, spec: str, doubt: bool) -> None:
    x = torch.eye(5)
    y = model(x).argmax(1)
    with pytest.raises(ModelError, match=rf"^attack '{spec}': the model .*{said}"):
        evaluate(model, x, y, Linf(0.3), attacks=[spec], doubt=doubt)


def test_a_model_that_fails_after_the_first_pass_of_an_attack() -> None:
    class Tires(nn.Linear):
        left = 2

        def forward(self, x: Tensor) -> Tensor:
            self.left -= 1
            if self.left < 0:
                raise ValueError("tired")
            return super().forward(x)

    x, model = torch.rand(4, 5), Tires(5, 3)
    with pytest.raises(ModelError, match=r"fails on others of shape .* ValueError: tired"):
        flatrock.attack("pgd", model, x, torch.zeros(4, dtype=torch.int64), Linf(0.1), steps=5)


def test_a_class_that_is_masked_with_infinity_is_told_what_to_write() -> None:
    class Masked(nn.Linear):
        value = -torch.inf

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x), torch.full_like(x[:, :1], self.value)], 1)

    x, model = torch.rand(4, 5), Masked(5, 3)
    y = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ModelError, match=r"damaged, or a class is masked: .* finite negative number such as -1e4"):
        evaluate(model, x, y, Linf(0.1), attacks=["fgsm"])
    model.value = torch.inf
    with pytest.raises(ModelError, match=r"its weights are damaged$"):
        evaluate(model, x, y, Linf(0.1), attacks=["fgsm"])


class Spoilt(nn.Linear):
    """A network that overwrites what its own backward pass needs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp().mul_(2)


@pytest.mark.parametrize("spec", ["fgsm", "pgd-2", "apgd-ce", "fab"])
def test_a_backward_pass_that_fails_is_quoted_before_any_attack_runs(spec: str) -> None:
    model, watch, x = Spoilt(5, 4), Watch(), torch.rand(4, 5)
    with torch.no_grad():
        y = model(x).argmax(1)
    said = f"'{spec}' needs gradients, but the model's backward pass fails: RuntimeError: one of the variables needed"
    with pytest.raises(ModelError, match=said):
        evaluate(model, x, y, Linf(0.1), attacks=["square:queries=5", spec], progress=watch)
    assert watch.begun == 0
    assert evaluate(model, x, y, Linf(0.1), attacks=["square:queries=5"]).clean == 1


class Loaded(nn.Linear):
    """A network as `flatrock.load` returns it: with marks."""

    marks = (TEST_SELECTED,)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential, lambda m: nn.Sequential(nn.Identity(), nn.Sequential(m))])
def test_marks_are_seen_through_wrappers(wrap: Callable[[nn.Module], nn.Module]) -> None:
    x, y = samples()
    result = evaluate(wrap(Loaded(5, 3)), x, y, Linf(0.1), attacks=["fgsm"], marks=("mine",))
    assert result.marks == ("mine", TEST_SELECTED)
    assert "E03" in {f.code for f in result.findings}


def test_one_mark_may_be_told_as_text() -> None:
    x, y = samples()
    result = evaluate(nn.Linear(5, 3), x, y, Linf(0.1), attacks=["fgsm"], marks=TEST_SELECTED)
    assert result.marks == (TEST_SELECTED,)
    assert "E03" in {f.code for f in result.findings}


@pytest.mark.parametrize("value", [Path("w.pt"), torch.zeros(2), {"a": {1, 2}}, float("nan")], ids=repr)
def test_provenance_that_no_file_can_hold_is_refused_first(value: object) -> None:
    x, y = samples()
    watch = Watch()
    with pytest.raises(ConfigError, match=r"provenance 'weights' cannot be stored as JSON .*; give text"):
        evaluate(nn.Linear(5, 3), x, y, Linf(0.1), progress=watch, provenance={"note": "fine", "weights": value})
    assert watch.begun == 0


def test_provenance_of_a_surrogate_is_a_dictionary() -> None:
    x, y = samples()
    model, other = nn.Linear(5, 3), nn.Linear(5, 3)
    with pytest.raises(ConfigError, match="provenance 'surrogate' must be a dictionary"):
        evaluate(model, x, y, Linf(0.1), surrogate=other, provenance={"surrogate": "resnet"})
