"""BatchNorm and ReLU as one operation: same function, same gradient, and when a network is left as it is."""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from flatrock.core.rng import Seed, kept_global_rng
from flatrock.models.catalog import create_model
from flatrock.models.fused import fused
from flatrock.models.fused_layers import Affine, FoldedConv, PaddedConv, refold
from flatrock.models.replay import LARGEST, OFTEN, Replay

NETWORKS = ["preact_resnet18", "resnet18", "resnet20", "vgg16_bn", "mobilenet_v2", "digits_cnn", "moons_mlp"]


def stirred(model: nn.Module) -> nn.Module:
    """The network in eval mode, with statistics and affine parameters of BatchNorm drawn at random."""
    generator = Seed(2).generator()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for tensor in (module.running_mean, module.weight, module.bias):
                assert tensor is not None
                tensor.data.normal_(generator=generator)
            assert module.running_var is not None
            module.running_var.uniform_(0.5, 2, generator=generator)
    return model.eval().requires_grad_(False)


def answer_and_gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_(True)
    logits = model(leaf)
    (grad,) = torch.autograd.grad(logits.square().sum(), leaf)
    return logits.detach(), grad


def norms_in(model: nn.Module) -> int:
    return sum(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in model.modules())


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_compute_what_they_computed(name: str) -> None:
    model = stirred(create_model(name, num_classes=4).double())
    x = torch.rand(3, *model.input_shape, dtype=torch.float64, generator=Seed(1).generator())  # type: ignore[arg-type]
    faster, plain = fused(copy.deepcopy(model))
    for got, true in zip(answer_and_gradient(faster, x), answer_and_gradient(model, x), strict=True):
        assert float((got - true).abs().max()) <= 1e-12 * float(true.abs().max())
    assert plain
    assert norms_in(faster) == 0
    assert sum(isinstance(m, Affine) for m in faster.modules()) == norms_in(model)


def test_sums_and_relus_around_a_batch_norm_are_fused() -> None:
    faster, _ = fused(create_model("preact_resnet18", num_classes=10).eval())
    layers = [m for m in faster.modules() if isinstance(m, Affine)]
    assert [m.relu for m in layers] == 17 * [True]
    assert sum(isinstance(m, FoldedConv) for m in faster.modules()) == 8, "the first convolution of every block"
    assert sum(m.keep for m in layers) == 4, "of eight sums four are read again by an identity shortcut"
    assert sum(m.twice for m in layers) == 3, "where the width changes, two convolutions read an activation"
    assert isinstance(faster, fx.GraphModule)
    left = {n.target for n in faster.graph.nodes if n.op == "call_function"}
    assert not left & {operator.add, F.relu}
    assert sum(isinstance(m, PaddedConv) for m in faster.modules()) == 1, "the first convolution has 3 channels"


class ReadTwice(nn.Module):
    """The BatchNorm's output is also read without the ReLU, and the same BatchNorm is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        first = self.norm(x)
        return F.relu(self.norm(first)) + torch.relu(first) - first


class Sums(nn.Module):
    """Sums before a BatchNorm: of different shapes, in place, read again before and after, and with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm(x + x.mean(0, keepdim=True)))
        out = out + self.norm(x.mean(0, keepdim=True) + out)
        early = x * 2
        early += out
        total = self.norm(early) + x
        before = total.tanh()
        return F.relu(self.norm(total)) + before + total + self.norm(total) + self.norm(total + 1)


class Branching(nn.Module):
    """Cannot be traced: what it does depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return F.relu(out) if bool(x.sum() > -1e9) else out


class Noisy(nn.Module):
    """Makes a tensor of its own; tracing would freeze it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x)) + torch.randn(4)


class Moody(Noisy):
    """Makes a number of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x)) + random.random()


class Bare(nn.Module):
    """BatchNorms that keep no statistics, or no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.without_statistics = nn.BatchNorm1d(4, track_running_stats=False)
        self.without_weights = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.without_weights(F.relu(self.without_statistics(x)))
        return out


def batch() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=Seed(1).generator())


@pytest.mark.parametrize(
    ("model", "plain", "left"),
    [(ReadTwice(), True, 0), (Sums(), True, 0), (Branching(), False, 0), (Bare(), True, 1)],
    ids=str,
)
def test_odd_networks_too(model: nn.Module, plain: bool, left: int) -> None:
    model = model.double().eval()
    if not isinstance(model, Bare):
        stirred(model)
    faster, is_plain = fused(copy.deepcopy(model))
    for got, true in zip(answer_and_gradient(faster, batch()), answer_and_gradient(model, batch()), strict=True):
        assert float((got - true).abs().max()) <= 1e-12 * float(true.abs().max())
    assert is_plain == plain
    assert norms_in(faster) == left


@pytest.mark.parametrize("kind", [Noisy, Moody])
def test_randomness_is_not_frozen(kind: type[nn.Module]) -> None:
    faster, plain = fused(kind().double().eval())
    with kept_global_rng(seed=Seed(3)):
        assert not torch.equal(faster(batch()), faster(batch()))
    assert not plain


def test_hooks_are_not_lost() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).double().eval()
    model.register_forward_hook(lambda module, inputs, output: output + 1)
    expected = model(batch())
    faster, plain = fused(model)
    assert torch.allclose(faster(batch()), expected, rtol=1e-12)
    assert not plain


class OwnNorm(nn.BatchNorm1d):
    """A BatchNorm that does more."""

    def forward(self, input: Tensor) -> Tensor:
        return 3 * super().forward(input)


def hooked_norm() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm.register_forward_hook(lambda module, inputs, output: output + 1)
    return norm


class ByKeyword(nn.Module):
    """Calls its BatchNorm by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(input=x))


@pytest.mark.parametrize("trace", [True, False], ids=["traced", "as it is"])
@pytest.mark.parametrize("make", [lambda: OwnNorm(4), hooked_norm, ByKeyword], ids=["subclass", "hook", "keyword"])
def test_a_batch_norm_that_is_more_keeps_it(make: Callable[[], nn.Module], trace: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.ReLU()).double().eval()
    expected = model(batch())
    faster, _ = fused(copy.deepcopy(model), trace=trace)
    assert torch.allclose(faster(batch()), expected, rtol=1e-12)


class Optional(nn.Module):
    """A stand-in in the place of its optional argument would take the other branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return F.relu(self.norm(x)) if other is None else x + other


class Coin(Noisy):
    """Tosses a coin; two traces may well look alike."""

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm(x))
        return out if random.random() < 1e-9 else -out


@pytest.mark.parametrize("model", [Optional(), Coin()], ids=["optional argument", "coin"])
def test_what_a_trace_cannot_hold_is_not_traced(model: nn.Module) -> None:
    model = model.double().eval()
    faster, plain = fused(copy.deepcopy(model))
    assert not plain
    assert torch.allclose(faster(batch()), model(batch()), rtol=1e-12)


def test_a_batch_norm_in_train_mode_stays() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()).double().train()
    faster, _ = fused(copy.deepcopy(model))
    assert torch.equal(faster(batch()), model(batch()))


def test_half_precision_does_not_round_factor_and_shift() -> None:
    model = stirred(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()))
    faster, _ = fused(copy.deepcopy(model))
    faster.half()
    kinds = {t.dtype for m in faster.modules() if isinstance(m, Affine) for t in (m.scale, m.shift)}
    assert kinds == {torch.float32}
    assert faster(batch().half()).dtype == torch.float16


def test_without_a_gpu_nothing_is_recorded() -> None:
    calls: list[int] = []

    def work(x: Tensor) -> Tensor:
        calls.append(len(x))
        return 2 * x

    replay = Replay()
    for _ in range(2 * OFTEN["pass"]):
        assert torch.equal(replay(work, batch()), 2 * batch())
    assert calls == 2 * OFTEN["pass"] * [6]


@pytest.mark.parametrize("how", [{"stride": 2, "padding": 1}, {"bias": False}, {"dilation": 2}], ids=str)
def test_padded_convolutions(how: dict[str, Any]) -> None:
    conv = nn.Conv2d(3, 5, 3, **how).double()
    x = torch.rand(2, 3, 9, 9, dtype=torch.float64, generator=Seed(1).generator())
    padded = PaddedConv(conv, "conv")
    assert padded.weight.shape == (5, 8, 3, 3)
    assert torch.allclose(padded(x), conv(x), rtol=1e-12, atol=1e-12)


def test_padded_convolutions_cast_what_they_read() -> None:
    conv = nn.Conv2d(3, 5, 3)
    x = torch.rand(2, 3, 9, 9, generator=Seed(1).generator())
    out = PaddedConv(conv, "conv").bfloat16()(x)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), conv(x), atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_padded_convolutions_on_a_gpu(channels: int, dtype: torch.dtype, last: bool) -> None:
    """Nothing but the padding: a convolution that hands its inputs on, and gradients that come back."""
    conv = nn.Conv2d(channels, 8, 1, bias=False)
    nn.init.dirac_(conv.weight)
    padded = PaddedConv(conv, "conv").cuda().half().requires_grad_(False)
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(5, channels, 9, 7, generator=Seed(1).generator()).cuda().to(dtype).contiguous(memory_format=layout)
    leaf = x.clone().requires_grad_(True)
    out = padded(leaf)
    assert out.dtype == torch.float16
    assert torch.equal(out[:, :channels], x.half())
    assert not out[:, channels:].any()
    (grad,) = torch.autograd.grad(out, leaf, out)
    assert grad.dtype == x.dtype
    assert grad.is_contiguous(memory_format=layout)
    assert torch.equal(grad, x.half().to(dtype))


CONVS: list[dict[str, Any]] = [
    {"bias": False, "padding": 1},
    {"padding": (0, 1), "stride": 2},
    {"padding": 2, "dilation": 2},
]


def conv_and_norm(how: dict[str, Any]) -> tuple[nn.Conv2d, nn.Module, FoldedConv]:
    with kept_global_rng(seed=Seed(3)):
        conv = nn.Conv2d(8, 24, 3, **how).requires_grad_(False)
    norm = stirred(nn.BatchNorm2d(24))
    return conv, norm, FoldedConv(conv, "conv", Affine(norm, "norm", relu=True))


@pytest.mark.parametrize("how", CONVS, ids=str)
def test_folded_convolutions(how: dict[str, Any]) -> None:
    """relu(norm(conv(x))) and its gradient, for the values of now."""
    conv, norm, _ = conv_and_norm(how)
    conv, norm = conv.double(), norm.double()
    folded = FoldedConv(conv, "conv", Affine(norm, "norm", relu=True))
    x = torch.rand(2, 8, 9, 9, dtype=torch.float64, generator=Seed(1).generator())
    for _ in range(2):
        three = nn.Sequential(conv, norm, nn.ReLU())
        for got, true in zip(answer_and_gradient(folded, x), answer_and_gradient(three, x), strict=True):
            assert torch.allclose(got, true, rtol=1e-12, atol=1e-12)
        conv.weight.data.mul_(-0.5)
        refold([folded], [conv.weight], [conv.bias])


@pytest.mark.parametrize(
    "how", [{"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}, {"groups": 2}], ids=str
)
def test_convolutions_that_are_not_folded(how: dict[str, Any]) -> None:
    with kept_global_rng(seed=Seed(3)):
        conv = nn.Conv2d(8, 24, 3, **how)
    model = stirred(nn.Sequential(conv, nn.BatchNorm2d(24), nn.ReLU()).double())
    faster, plain = fused(copy.deepcopy(model))
    assert plain
    assert not any(isinstance(m, FoldedConv) for m in faster.modules())
    x = torch.rand(2, 8, 9, 9, dtype=torch.float64, generator=Seed(1).generator())
    for got, true in zip(answer_and_gradient(faster, x), answer_and_gradient(model, x), strict=True):
        assert torch.allclose(got, true, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("how", CONVS, ids=str)
def test_folded_convolutions_on_a_gpu(how: dict[str, Any], last: bool) -> None:
    conv, norm, folded = conv_and_norm(how)
    x = torch.randn(4, 8, 9, 9, generator=Seed(1).generator())
    true = answer_and_gradient(nn.Sequential(conv, norm, nn.ReLU()), x)
    layout = torch.channels_last if last else torch.contiguous_format
    folded = folded.cuda().half().requires_grad_(False).to(memory_format=layout)  # type: ignore[call-overload]
    small = x.cuda().half().contiguous(memory_format=layout)
    leaf = small.clone().requires_grad_(True)
    out = folded(leaf)
    assert out.is_contiguous(memory_format=layout)
    (grad,) = torch.autograd.grad(out.float().square().sum(), leaf)
    for got, exact in zip((out, grad), true, strict=True):
        assert float((got.detach().float().cpu() - exact).norm()) <= 4e-3 * float(exact.norm())
    small[0] = float("nan")
    answer = folded(small)
    assert bool(torch.isnan(answer[0]).all()), "what overflowed must not look like a zero"
    assert bool(torch.isfinite(answer[1:]).all())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 5, 7, 2), (130, 70), (2, 64, 8, 8), (4097, 33), (2, 160, 5, 5)], ids=str)
@pytest.mark.parametrize("relu", [True, False], ids=["relu", "affine"])
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("keep", [False, True], ids=["sum dropped", "sum kept"])
@pytest.mark.parametrize("readers", [(0,), (0, 1), (1,)], ids=["one reader", "two readers", "the second alone"])
def test_the_kernels_on_a_gpu(
    shape: tuple[int, ...], relu: bool, terms: int, keep: bool, readers: tuple[int, ...]
) -> None:
    x = torch.randn(2, *shape, generator=Seed(1).generator())
    norm: nn.Module = nn.BatchNorm2d(shape[1]) if len(shape) == 4 else nn.BatchNorm1d(shape[1])
    layer = Affine(stirred(norm), "norm", relu=relu, twice=True, keep=keep)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_(True)
        answers = layer(*(leaf[i] for i in range(terms)))
        assert torch.equal(answers[0], answers[1])
        read = [*(answers[i] * (i + 1) for i in readers), *answers[2:]]
        (grad,) = torch.autograd.grad(sum(a.float().square().sum() for a in read), leaf)
        return torch.cat([a.detach().flatten() for a in answers]), grad

    true, true_grad = both(x)
    layer.scale, layer.shift = layer.scale.cuda(), layer.shift.cuda()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
        got, grad = both(x.cuda().to(dtype))
        assert got.dtype == grad.dtype == dtype
        assert torch.allclose(got.cpu().float(), true, atol=4 * tolerance, rtol=tolerance)
        assert (grad.cpu().float() - true_grad).norm() <= 2 * tolerance * true_grad.norm()
    x[0, 0] = float("nan")
    assert bool(torch.isnan(layer(x[0].cuda())[0][0]).all())


@pytest.mark.gpu
def test_recordings_say_what_the_network_says() -> None:
    model = stirred(create_model("digits_cnn", num_classes=10)).cuda()
    replay = Replay()
    with torch.no_grad():
        for size in [*range(1, 80), LARGEST, LARGEST + 1, 40, 40] * 2:
            x = torch.rand(size, *model.input_shape, generator=Seed(size).generator()).cuda()  # type: ignore[misc]
            assert torch.allclose(replay(model, x), model(x), atol=1e-5, rtol=1e-5)
    assert replay._recorded


@pytest.mark.gpu
def test_a_network_that_cannot_be_recorded_runs_as_it_is() -> None:
    def waits(x: Tensor) -> Tensor:
        return x * float(x.sum().cpu() > -1e9)

    replay = Replay()
    x = torch.rand(8, 4).cuda()
    for _ in range(2 * OFTEN["pass"]):
        assert torch.equal(replay(waits, x), x)
    assert not replay._recorded
    assert torch.rand(3, device="cuda").shape == (3,), "the random generator is in order"
