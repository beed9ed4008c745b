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
from flatrock.models.norm import count_batches, normalised, usual

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
    count_batches([norm], parts)
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6, 4, 5, 3), (128, 64, 32, 32), (128, 160, 8, 8), (64, 512, 4, 4), (5, 70, 7, 7)])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("relu", [True, False], ids=["relu", "alone"])
def test_the_kernels_are_batch_norm(shape: tuple[int, ...], dtype: torch.dtype, parts: int, relu: bool) -> None:
    """Far from 0 too, where squares alone would leave no digits for the variance."""
    norm = layer(shape[1], 4).float().cuda()
    x, grad = (tensor.cuda().to(dtype) for tensor in draws(shape, parts))
    x = (x + 20).contiguous(memory_format=torch.channels_last)
    true, left = given(copy.deepcopy(norm).double(), x.double(), grad.double(), parts=parts, relu=relu)
    found, kept = got(norm, x, grad, parts=parts, relu=relu, kernels=True)
    rounding = 3e-2 if dtype is torch.bfloat16 else 1e-3
    for a, b in zip(found, true, strict=True):
        # By length: where a sum is near 0 the ReLU falls on either side of it.
        assert float((a.double() - b).norm()) <= rounding * float(b.norm())
    for a, b in zip(kept, left, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-4)


def test_only_usual_layers_take_part() -> None:
    assert usual(nn.BatchNorm2d(3))
    for other in (
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.BatchNorm2d(3, momentum=None),
        nn.SyncBatchNorm(3),
        nn.GroupNorm(1, 3),
    ):
        assert not usual(other)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_other_layers_and_modes_run_as_they_are(options: dict[str, None], training: bool) -> None:
    x = torch.randn(6, 3, 4, 4, generator=Seed(1).generator())
    norm = nn.BatchNorm2d(3, **options).train(training)  # type: ignore[arg-type]
    apart = copy.deepcopy(norm)
    true = torch.cat([F.relu(apart(part)) for part in x.chunk(2)])
    (a, b) = Joint(norm, 2).passes(lambda whole: (activated(norm, whole),), list(x.chunk(2)))
    assert torch.equal(torch.cat([a, b]), true)
    assert all(map(torch.equal, norm.buffers(), apart.buffers()))


def test_layers_forget_what_they_were_told() -> None:
    norm = nn.BatchNorm2d(3)
    x = torch.randn(6, 3, 4, 4, generator=Seed(1).generator())

    def inside(whole: Tensor) -> tuple[Tensor]:
        assert "activated" in norm.__dict__
        return (activated(norm, whole),)

    Joint(norm, 1).passes(partial(inside), [x])
    assert not {"activated", "forward"} & norm.__dict__.keys()
