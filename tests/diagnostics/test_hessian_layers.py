"""Products with the Hessian for layers torch does not differentiate well in every way, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curvature_cases import CASES, dense_net, samples
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from flatrock.core.errors import ModelError
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.diagnostics.curvature import Settings, curvature
from flatrock.diagnostics.hessian import Hessian, check_network, check_symmetric, margin, still


class Attention(nn.Module):
    """Three tokens of four numbers that look at each other, by the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (3, 4))
        out: Tensor = self.inner(tokens, tokens, tokens, need_weights=False)[0].flatten(1)
        return out


class Channels(nn.Module):
    """Twelve numbers as two channels, for norms of pictures."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.unflatten(1, (2, 6))).flatten(1)
        return out


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(12),
    "InstanceNorm": lambda: Channels(nn.InstanceNorm1d(2, affine=True)),
    "GroupNorm": lambda: nn.GroupNorm(3, 12),
    "RMSNorm": lambda: nn.RMSNorm(12),
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "attention": Attention,
}


def net_with(layer: Callable[[], nn.Module]) -> nn.Module:
    with kept_global_rng(seed=Seed(6)):
        return nn.Sequential(nn.Linear(3, 12), layer(), nn.Tanh(), nn.Linear(12, 3)).double().eval()


@pytest.fixture(params=LAYERS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A network, samples, labels, and the Hessian by central differences of gradients."""
    net = net_with(LAYERS[request.param])
    x, y = samples((3,), 3)
    return net, x, y, differences(net, x, y)


def differences(net: nn.Module, x: Tensor, y: Tensor, h: float = 1e-5) -> Tensor:
    parameters = list(net.parameters())

    def slope() -> Tensor:
        found = torch.autograd.grad(F.cross_entropy(net(x), y), parameters)
        return torch.cat([g.flatten() for g in found])

    rows = []
    for p in parameters:
        flat = p.data.view(-1)
        for i in range(flat.numel()):
            was = flat[i].item()
            flat[i] = was + h
            ahead = slope()
            flat[i] = was - h
            behind = slope()
            flat[i] = was
            rows.append((ahead - behind) / (2 * h))
    return torch.stack(rows)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_products_are_those_of_finite_differences(case: tuple[nn.Module, Tensor, Tensor, Tensor]) -> None:
    net, x, y, truth = case
    named = dict(net.named_parameters())
    with still(net, x, y):
        found = Hessian(net, x, y, named, batch_size=7) @ torch.eye(len(truth), dtype=torch.float64)
        check_network(net, x, y, named, Seed(0))
    assert relative(found, truth) < 1e-8
    assert relative(found.mT, found) < 1e-13


@pytest.mark.parametrize("trace", ["exact", "hutch++"])
def test_curvature_is_that_of_finite_differences(case: tuple[nn.Module, Tensor, Tensor, Tensor], trace: str) -> None:
    net, x, y, truth = case
    # As many products as there are parameters: nothing is estimated.
    settings = Settings(trace=trace, probes=len(truth), runs=1, steps=50, top=2, awp_steps=1)
    found = curvature(net, x, y, beta=24, settings=settings)
    eigenvalues = torch.linalg.eigvalsh((truth + truth.mT) / 2)
    assert found.spectrum.largest[0][0] == pytest.approx(float(eigenvalues[-1]), rel=1e-7)
    assert found.spectrum.smallest[0][0] == pytest.approx(float(eigenvalues[0]), rel=1e-6)
    assert found.whole.trace.value == pytest.approx(float(truth.trace()), rel=1e-7)
    assert found.whole.square.value == pytest.approx(float(truth.square().sum()), rel=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_curvlinops_where_forward_mode_is_right(name: str) -> None:
    from curvlinops import HessianLinearOperator

    make, shape, classes = CASES[name]
    net = make()
    x, y = samples(shape, classes)
    named = dict(net.named_parameters())
    with still(net, x, y):
        columns = torch.randn(sum(p.numel() for p in named.values()), 3, generator=Seed(1).generator()).double()
        theirs = HessianLinearOperator(net, nn.CrossEntropyLoss(), list(named.values()), [(x, y)]) @ columns
        assert torch.allclose(Hessian(net, x, y, named) @ columns, theirs, rtol=1e-11, atol=1e-13)


def test_a_parameter_the_loss_does_not_use_has_rows_of_zero() -> None:
    net = dense_net()
    x, y = samples((3,), 3)
    unused = {"other": nn.Parameter(torch.ones(2, dtype=torch.float64))}
    named = dict(net.named_parameters())
    columns = torch.ones(88, 1, dtype=torch.float64)
    with still(net, x, y):
        both = Hessian(net, x, y, {**named, **unused}) @ columns
        assert torch.equal(both[:86], Hessian(net, x, y, named) @ columns[:86])
        assert both[86:].tolist() == [[0], [0]]
        assert (Hessian(net, x, y, unused) @ columns[:2]).tolist() == [[0], [0]]


class Forgetful(torch.autograd.Function):
    """x^2 with a backward pass that does not depend on what comes after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.detach() * 2 * ctx.saved_tensors[0]  # type: ignore[no-any-return]


class Slope(torch.autograd.Function):
    """2 x grad, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor) -> Tensor:
        return 2 * x * grad

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the derivative of slope is not implemented")


class Once(Forgetful):
    """x^2 without a second derivative."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Slope.apply(grad, ctx.saved_tensors[0])  # type: ignore[no-any-return]


class Squared(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (Forgetful, r"not symmetric: u\.Hv and v\.Hu .* differ by [\d.]+ of \|Hv\|, and rounding explains 1\.5e-08"),
        (Once, "cannot be differentiated twice, as a Hessian needs: the derivative of slope is not"),
    ],
)
def test_second_derivatives_that_are_wrong_or_missing_are_refused(
    function: type[torch.autograd.Function], said: str
) -> None:
    x, y = samples((3,), 3)
    with pytest.raises(ModelError, match=said):
        curvature(net_with(lambda: Squared(function)), x, y, beta=24)


def test_weight_norm_is_refused_and_spectral_norm_is_not() -> None:
    x, y = samples((3,), 3)
    for make, right in ((parametrizations.weight_norm, False), (parametrizations.spectral_norm, True)):
        with kept_global_rng(seed=Seed(6)):
            net = nn.Sequential(make(nn.Linear(3, 12)), nn.Tanh(), nn.Linear(12, 3)).double().eval()
        with still(net, x, y):
            if right:
                check_network(net, x, y, dict(net.named_parameters()), Seed(0))
            else:
                with pytest.raises(ModelError, match=r"not symmetric.*Remove torch's weight_norm"):
                    check_network(net, x, y, dict(net.named_parameters()), Seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_guard_knows_rounding_from_asymmetry(dtype: torch.dtype) -> None:
    gen = Seed(2).generator()
    matrix = torch.randn(60, 60, generator=gen, dtype=torch.float64).to(dtype)
    symmetric = matrix + matrix.mT
    for seed in range(20):
        check_symmetric(symmetric, Seed(seed))
        with pytest.raises(ModelError, match="not symmetric"):
            check_symmetric(symmetric + 0.05 * matrix, Seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_of_zero_is_not_taken_for_a_wrong_layer(dtype: torch.dtype) -> None:
    """The Hessian of the cross-entropy is rounding alone there; that of the margins is not."""
    net = dense_net(scale=30).to(dtype)
    x = samples((3,), 3)[0].to(dtype)
    with torch.no_grad():
        y = net(x).argmax(1)
    named = dict(net.named_parameters())
    with still(net, x, y):
        assert F.cross_entropy(net(x), y).item() < 1e-6
        check_network(net, x, y, named, Seed(0))
    linear = nn.Linear(3, 3).to(dtype)
    with still(linear, x, y):  # margins of a linear network are not curved at all
        check_network(linear, x, y, dict(linear.named_parameters()), Seed(0))


def test_margin() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    assert float(margin(logits, torch.tensor([0, 2]))) == (1 - 2) + (4 - 1)
