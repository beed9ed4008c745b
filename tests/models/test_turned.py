"""Gradients of inputs by turned weights: the same gradients, kept up to date, only where they are faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatrock.core.layout import layout_of
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.models.fused_layers import FoldedConv
from flatrock.models.turned import TurnedConv, turnable
from flatrock.models.twin import Twin


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=Seed(1).generator())


@pytest.mark.parametrize(
    "how",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "padding": 0, "bias": False},
        {"kernel_size": (3, 5), "padding": (2, 1)},
        {"kernel_size": 2},
    ],
    ids=str,
)
def test_gradients_are_those_of_the_convolution(how: dict[str, Any]) -> None:
    conv = nn.Conv2d(96, 40, **how).double()
    assert turnable(conv)
    x = draw(2, 96, 7, 6).requires_grad_(True)
    true, got = conv(x), TurnedConv(conv, "conv")(x)
    assert torch.equal(got, true)
    weights = draw(*true.shape)
    (exact,), (found,) = (torch.autograd.grad(out, x, weights) for out in (true, got))
    assert torch.allclose(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(160, 160, 3, stride=2),
        nn.Conv2d(160, 160, 3, dilation=2),
        nn.Conv2d(160, 160, 3, groups=2),
        nn.Conv2d(160, 160, 3, padding=3),
        nn.Conv2d(160, 160, 3, padding="same"),
        nn.Conv2d(160, 160, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(320, 160, 3),
        nn.Conv2d(160, 160, 1),
        nn.Conv2d(16, 160, 3),
        nn.Linear(160, 160),
    ],
    ids=str,
)
def test_others_are_left_alone(other: nn.Module) -> None:
    assert not turnable(other)


class Net(nn.Module):
    """One convolution that is folded, one that is not, both of an odd width."""

    input_shape = (96, 5, 5)

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(96, 96, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(96)
        self.two = nn.Conv2d(96, 96, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.norm(self.one(x)).relu())
        return out.mean((2, 3))


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_a_twin_turns_both_and_keeps_them_up_to_date(last: bool) -> None:
    with kept_global_rng(seed=Seed(2)):
        model = Net().double().eval()
    twin = Twin(model, dtype=torch.float64, gradients=True, channels_last=last)
    (folded,) = (m for m in twin.modules() if isinstance(m, FoldedConv))
    (turned,) = (m for m in twin.modules() if isinstance(m, TurnedConv))
    x = draw(3, 96, 5, 5)
    for scale in (1.0, -0.5):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale).add_(0.01)
        twin.follow()
        for layer in (folded, turned):
            assert layer.turned is not None
            assert torch.equal(layer.turned, layer.weight.transpose(0, 1).flip(2, 3))
            assert layer.turned.is_contiguous(memory_format=layout_of(layer.weight))
        leaf = x.clone().requires_grad_(True)
        (true,) = torch.autograd.grad(model(leaf).square().sum(), leaf)
        (got,) = torch.autograd.grad(twin(leaf).square().sum(), leaf)
        assert float((got - true).abs().max()) <= 1e-5 * float(true.abs().max())


def test_a_shift_is_turned_too() -> None:
    with kept_global_rng(seed=Seed(2)):
        model = Net().double().eval()
    twin = Twin(model, dtype=torch.float64, gradients=True)
    twin.follow({name: torch.full_like(p, 0.1) for name, p in model.named_parameters()})
    for layer in twin.modules():
        if isinstance(layer, FoldedConv | TurnedConv):
            assert layer.turned is not None
            assert torch.equal(layer.turned, layer.weight.transpose(0, 1).flip(2, 3))


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the copy without turned weights: in half precision the network itself has ReLUs on other sides."""
    with kept_global_rng(seed=Seed(2)):
        model = Net().cuda().eval()
    leaf = draw(3, 96, 5, 5).float().cuda().requires_grad_(True)
    grads = []
    for wanted in (turnable, lambda _: False):
        for where in ("fused", "fused_layers"):
            monkeypatch.setattr(f"flatrock.models.{where}.turnable", wanted)
        twin = Twin(model, gradients=True)
        assert any(getattr(layer, "turned", None) is not None for layer in twin.modules()) == (wanted is turnable)
        grads += torch.autograd.grad(twin(leaf).square().sum(), leaf)
    got, true = grads
    assert float((got - true).norm()) <= 0.01 * float(true.norm())
