"""Models from elsewhere: TorchScript and quantised ones work, and what no attack can use is refused in words."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import attack
from flatrock.attacks.craft import FirstChecked
from flatrock.core.errors import ModelError
from flatrock.core.records import Result
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.threat import Linf
from flatrock.evaluation.evaluate import evaluate

THREAT = Linf(0.1)
WAYS: dict[str, Callable[[Any, Tensor, Tensor], object]] = {
    "attack": lambda m, x, y: attack("pgd", m, x, y, THREAT, steps=2),
    "attack without gradients": lambda m, x, y: attack("square", m, x, y, THREAT, queries=5),
    "evaluate": lambda m, x, y: evaluate(m, x, y, THREAT, attacks=["pgd-2"]),
}
every_way = pytest.mark.parametrize("go", WAYS.values(), ids=WAYS)
Go = Callable[[nn.Module, Tensor, Tensor], object]


def net() -> nn.Sequential:
    with kept_global_rng(seed=Seed(0).child("net")):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
        ).eval()


def data(n: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.rand(n, 1, 6, 6, generator=Seed(1).generator())
    with torch.no_grad():
        return x, net()(x).argmax(1)


def tensors(found: object) -> list[Tensor]:
    """What one of the ways found."""
    if isinstance(found, Result):
        return [*found.flags.values(), *found.margins.values()]
    assert isinstance(found, Tensor)
    return [found]


# TorchScript

SCRIPTED: dict[str, Callable[[nn.Module], Any]] = {
    "scripted": torch.jit.script,
    "traced": lambda m: torch.jit.trace(m, data()[0]),
    "frozen": lambda m: torch.jit.freeze(torch.jit.script(m)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("made", SCRIPTED.values(), ids=SCRIPTED)
def test_torchscript_is_attacked_as_the_network_it_came_from(made: Callable[[nn.Module], Any]) -> None:
    x, y = data()
    scripted = made(net())
    before = {k: v.clone() for k, v in scripted.state_dict().items()}
    assert torch.equal(attack("pgd", scripted, x, y, THREAT), attack("pgd", net(), x, y, THREAT))
    found = evaluate(scripted, x, y, THREAT, attacks=["pgd-5", "fab-t:steps=3", "square:queries=20"])
    plain = evaluate(net(), x, y, THREAT, attacks=["pgd-5", "fab-t:steps=3", "square:queries=20"])
    assert {k: v.tolist() for k, v in found.flags.items()} == {k: v.tolist() for k, v in plain.flags.items()}
    assert found.findings == ()
    assert all(torch.equal(v, before[k]) for k, v in scripted.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_in_train_mode_comes_back_in_it() -> None:
    x, y = data()
    scripted = torch.jit.script(net().train())
    result = evaluate(scripted, x, y, THREAT, attacks=["pgd-2"])
    assert [f.code for f in result.findings] == ["E01"]
    assert all(m.training for m in scripted.modules())


# Failures of the model's own


@every_way
def test_what_the_model_raises_is_quoted_with_the_shape_it_was_given(go: Go) -> None:
    x, y = data()
    said = r"fails on inputs of shape \(8, 6, 6, 1\), torch.float32 on cpu: RuntimeError: Given groups=1.*\[n, channels"
    with pytest.raises(ModelError, match=said) as caught:
        go(net(), x.permute(0, 2, 3, 1), y)
    assert isinstance(caught.value.__cause__, RuntimeError)


def through_data(x: Tensor) -> None:
    x.data.sub_(0.5)


def through_numpy(x: Tensor) -> None:
    x.detach().numpy()[...] -= 0.5


class InPlace(nn.Module):
    """Normalises what it is given where it lies."""

    def __init__(self, writes: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.net, self.writes = net(), writes

    def forward(self, x: Tensor) -> Tensor:
        self.writes(x)
        logits: Tensor = self.net(x)
        return logits


@every_way
@pytest.mark.parametrize("writes", [lambda x: x.sub_(0.5), through_data, through_numpy])
def test_a_model_that_writes_into_its_input_is_named(go: Go, writes: Callable[[Tensor], object]) -> None:
    x, y = data()
    before = x.clone()
    with pytest.raises(ModelError, match=r"writes into its input.*begin with x = x\.clone\(\)"):
        go(InPlace(writes), x, y)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: not enough memory")]
)
def test_short_memory_is_no_fault_of_the_model(error: RuntimeError) -> None:
    class Greedy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    with pytest.raises(type(error)) as caught:
        attack("pgd", Greedy(), *data(), THREAT)
    assert caught.value is error


def test_the_first_answer_is_checked_without_a_pass_of_its_own_and_only_it() -> None:
    seen: list[int] = []

    class Noted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return x if len(seen) == 1 else x * torch.nan

    x, y = torch.rand(2, 3), torch.tensor([0, 1])
    model = FirstChecked(Noted(), x, y)
    assert torch.equal(model(x), x)
    assert bool(model(x).isnan().all())
    assert seen == [2, 2]
    with pytest.raises(ModelError, match="NaN or infinite logits on clean inputs"):
        FirstChecked(model, x, y)(x)


@pytest.mark.parametrize("name", ["pgd", "cw", "apgd-ce", "langevin"])
def test_a_start_without_an_answer_is_broken_not_damaged(name: str) -> None:
    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x[:, :1] == 0.5, x, x + torch.inf)

    x, y = torch.full((4, 3), 0.5), torch.zeros(4).long()
    x_adv = attack(name, Overflows(), x, y, THREAT, steps=2)
    assert not bool(torch.isfinite(Overflows()(x_adv)).any())


# Weights that are not there, or not for gradients


@every_way
def test_lazy_layers_are_named_with_the_cure(go: Go) -> None:
    x, y = data()
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(3)).eval()
    with pytest.raises(ModelError, match=r"lazy layers .* pass a batch through it first: model\(x\[:2\]\)"):
        go(lazy, x, y)
    lazy(x[:2])
    go(lazy, x, y)


@every_way
def test_the_meta_device_is_named(go: Go) -> None:
    with pytest.raises(ModelError, match=r"meta device, without values; use model\.to_empty"):
        go(net().to("meta"), *data())


@every_way
def test_a_model_made_in_inference_mode_is_named_with_the_cure(go: Go) -> None:
    x, y = data()
    with torch.inference_mode():
        model = net()
    with pytest.raises(ModelError, match=r"made in torch\.inference_mode\(\).*use copy\.deepcopy\(model\)"):
        go(model, x, y)
    go(copy.deepcopy(model), x, y)


@every_way
def test_inputs_made_in_inference_mode_are_attacked_as_others(go: Go) -> None:
    x, y = data()
    with torch.inference_mode():
        inside = x.clone(), y.clone()
    assert all(t.is_inference() for t in inside)
    for got, true in zip(tensors(go(net(), *inside)), tensors(go(net(), x, y)), strict=True):
        assert torch.equal(got, true)


@every_way
def test_inputs_that_require_a_gradient_work_without_a_warning(go: Go) -> None:
    x, y = data()
    x.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go(net(), x, y)
    assert x.grad is None
    assert x.requires_grad
