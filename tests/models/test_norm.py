"""BatchNorm in train mode and the ReLU behind it as one operation: same function, gradients and statistics."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.core.rng import Seed
from flatrock.models.joint import Joint
from flatrock.models.layers import activated
from flatrock.models.norm import PromptNorm2d, normalised, usual

SHAPES = [(6, 4, 5, 3), (9, 7), (2, 3, 4), (5, 160, 4, 4)]


def layer(channels: int, dims: int, **options: float) -> nn.Module:
    norm: nn.Module = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[dims](channels, **options)  # type: ignore[arg-type]
    generator = Seed(2).generator()
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        assert isinstance(tensor, Tensor)
        tensor.data.normal_(generator=generator)
    return norm.double()


def given(norm: nn.Module, x: Tensor, grad: Tensor, *, parts: int, relu: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of plain layers, batch by batch; and the buffers they leave."""
    leaf = x.clone().requires_grad_(True)
    out = torch.cat([F.relu(norm(part)) if relu else norm(part) for part in leaf.chunk(parts)])
    grads = torch.autograd.grad(out, [leaf, *norm.parameters()], grad)
    return [out.detach(), *grads], list(norm.buffers())


def got(
    norm: nn.Module, x: Tensor, grad: Tensor, *, parts: int, relu: bool, kernels: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    leaf = x.clone().requires_grad_(True)
    out = normalised(norm, leaf, parts=parts, relu=relu, kernels=kernels)
    grads = torch.autograd.grad(out, [leaf, *norm.parameters()], grad)
    return [out.detach(), *grads], list(norm.buffers())


def draws(shape: tuple[int, ...], parts: int) -> tuple[Tensor, Tensor]:
    generator = Seed(1).generator()
    x, grad = torch.randn(2, parts * shape[0], *shape[1:], dtype=torch.float64, generator=generator)
    return 2 * x + 1, grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("relu", [True, False], ids=["relu", "alone"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.3, "eps": 0.1}], ids=["usual", "other"])
def test_it_is_batch_norm(shape: tuple[int, ...], parts: int, relu: bool, options: dict[str, float]) -> None:
    norm = layer(shape[1], len(shape), **options)
    x, grad = draws(shape, parts)
    true, left = given(copy.deepcopy(norm), x, grad, parts=parts, relu=relu)
    found, kept = got(norm, x, grad, parts=parts, relu=relu)
    for a, b in zip(found + kept, true + left, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


def test_bfloat16_beside_float32_weights() -> None:
    """As torch computes it: sums and arithmetic in float32, the result rounded once."""
    norm = layer(4, 4).float()
    x, grad = (tensor.bfloat16() for tensor in draws((6, 4, 5, 3), 2))
    true, left = given(copy.deepcopy(norm), x, grad, parts=2, relu=True)
    found, kept = got(norm, x, grad, parts=2, relu=True)
    assert [t.dtype for t in found] == [t.dtype for t in true]
    for a, b in zip(found + kept, true + left, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-2 if a.dtype == torch.bfloat16 else 1e-5)


def test_a_relu_at_rest_lets_nothing_through() -> None:
    norm = layer(4, 4)
    nn.init.zeros_(norm.weight)  # type: ignore[arg-type]
    nn.init.zeros_(norm.bias)  # type: ignore[arg-type]
    x, grad = draws((6, 4, 5, 3), 1)
    (_, *grads), _ = got(norm, x, grad, parts=1, relu=True)
    assert not any(g.any() for g in grads)


def test_the_variance_of_a_dead_channel_is_none() -> None:
    norm = PromptNorm2d(3, momentum=0.01, first=2)
    normalised(norm, torch.zeros(8, 3, 4, 4), parts=2, relu=True, kernels=False)
    assert norm.running_var is not None
    assert norm.running_var.tolist() == [0, 0, 0]


def test_second_derivatives_are_refused() -> None:
    norm = layer(4, 4)
    x = draws((6, 4, 5, 3), 1)[0].requires_grad_(True)
    out = normalised(norm, x, parts=1, relu=False, kernels=False)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6, 4, 5, 3), (128, 64, 32, 32), (128, 160, 8, 8), (64, 512, 4, 4), (5, 70, 7, 7)])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("relu", [True, False], ids=["relu", "alone"])
def test_the_kernels_are_batch_norm(shape: tuple[int, ...], dtype: torch.dtype, parts: int, relu: bool) -> None:
    norm = layer(shape[1], 4).float().cuda()
    x, grad = (tensor.cuda().to(dtype) for tensor in draws(shape, parts))
    x = x.contiguous(memory_format=torch.channels_last)
    exact = copy.deepcopy(norm).double()
    # Where the sum is near 0 rounding decides on which side of the ReLU it falls: no gradient from there.
    before = torch.cat([copy.deepcopy(exact)(part) for part in x.double().chunk(parts)])
    grad = torch.where(before.abs() < 1e-3, 0, grad)
    true, left = given(exact, x.double(), grad.double(), parts=parts, relu=relu)
    found, kept = got(norm, x, grad, parts=parts, relu=relu, kernels=True)
    rounding = 1e-2 if dtype is torch.bfloat16 else 2e-5
    for a, b in zip(found, true, strict=True):
        assert float((a.double() - b).norm()) <= rounding * float(b.norm())
    for a, b in zip(kept, left, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6, 4, 5, 3), (128, 64, 8, 8), (5, 70, 7, 7)])
def test_the_kernels_far_from_zero(shape: tuple[int, ...]) -> None:
    """Squares alone would leave no digits for the variance there."""
    norm = layer(shape[1], 4).float().cuda()
    x = (draws(shape, 2)[0] + 2000).float().cuda().contiguous(memory_format=torch.channels_last)
    true, left = given(copy.deepcopy(norm).double(), x.double(), torch.ones_like(x).double(), parts=2, relu=False)
    found, kept = got(norm, x, torch.ones_like(x), parts=2, relu=False, kernels=True)
    assert float((found[0].double() - true[0]).norm()) <= 2e-3 * float(true[0].norm())
    for a, b in zip(kept, left, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-4)


def test_only_usual_layers_take_part() -> None:
    assert usual(nn.BatchNorm2d(3))
    uncounted = nn.BatchNorm2d(3)
    uncounted.num_batches_tracked = None

    class Own(nn.BatchNorm2d):
        """Does more than its parent, perhaps."""

    for other in (
        uncounted,
        Own(3),
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.BatchNorm2d(3, momentum=None),
        nn.SyncBatchNorm(3),
        nn.GroupNorm(1, 3),
    ):
        assert not usual(other)


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str
)
@pytest.mark.parametrize("training", [True, False])
def test_other_layers_and_modes_run_as_they_are(options: dict[str, None], training: bool) -> None:
    x = torch.randn(6, 3, 4, 4, generator=Seed(1).generator())
    norm = nn.BatchNorm2d(3, **options).train(training)  # type: ignore[arg-type]
    apart = copy.deepcopy(norm)
    true = torch.cat([F.relu(apart(part)) for part in x.chunk(2)])
    (a, b) = Joint(norm, 2).passes(lambda whole: (activated(norm, whole),), list(x.chunk(2)))
    assert torch.allclose(torch.cat([a, b]), true, atol=1e-6)
    assert all(map(torch.allclose, norm.buffers(), apart.buffers()))


def test_layers_forget_what_they_were_told() -> None:
    norm = nn.BatchNorm2d(3)
    x = torch.randn(6, 3, 4, 4, generator=Seed(1).generator())

    def inside(whole: Tensor) -> tuple[Tensor]:
        assert "activated" in norm.__dict__
        return (activated(norm, whole),)

    Joint(norm, 1).passes(partial(inside), [x])
    assert not {"activated", "forward"} & norm.__dict__.keys()
