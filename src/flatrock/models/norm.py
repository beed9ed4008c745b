"""BatchNorm in train mode and the ReLU behind it as one operation over several batches in one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.models.fused_layers import NORMS


def _by_batch(x: Tensor, parts: int) -> Tensor:
    """[parts * n, c, ...] as [parts, n, c, ...]."""
    return x.view(parts, x.shape[0] // parts, *x.shape[1:])


def _spread(values: Tensor, x: Tensor) -> Tensor:
    """[parts, c], to be combined with what `_by_batch` gives."""
    return values.reshape(values.shape[0], 1, values.shape[1], *[1] * (x.dim() - 2))


def _moments(x: Tensor, parts: int, kernels: bool) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance [parts, c] of every batch."""
    if kernels:
        from flatrock.models.norm_triton import moments

        mean, var = moments(x, parts)
        return mean, var
    split = _by_batch(x, parts).to(torch.promote_types(x.dtype, torch.float32))
    dims = [1, *range(3, split.dim())]
    var, mean = torch.var_mean(split, dims, correction=0)
    return mean, var


def _grad_moments(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, *, relu: bool, kernels: bool
) -> tuple[Tensor, Tensor]:
    """Sums [parts, c] of g and of g * (x - mean) over every batch, g the gradient without what the ReLU stopped."""
    if kernels:
        from flatrock.models.norm_triton import grad_moments

        total, product = grad_moments(grad, x, mean, scale, shift, relu)
        return total, product
    parts = mean.shape[0]
    split, value = _let_through(_by_batch(grad, parts), _by_batch(x, parts).to(mean.dtype), scale, shift, relu)
    dims = [1, *range(3, split.dim())]
    return split.sum(dims), (split * (value - _spread(mean, x))).sum(dims)


def _let_through(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    """The gradient that reaches the BatchNorm, and x."""
    grad = grad.to(x.dtype)
    if relu:
        grad = torch.where(x * _spread(scale, x[0]) + _spread(shift, x[0]) <= 0, 0, grad)
    return grad, x


class _Normalised(torch.autograd.Function):
    """relu((x - mean) / sqrt(var + eps) * weight + bias), mean and var of every batch; and both.

    Only sums over a batch need kernels of their own: the rest is arithmetic per entry, which a compiler puts together
    with what stands before and behind. The mask of the ReLU is computed again, not kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, parts: int, eps: float, relu: bool, kernels: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, var = _moments(x, parts, kernels)
        scale = weight * (var + eps).rsqrt()
        shift = bias - mean * scale
        split = _by_batch(x, parts)
        out = split.to(scale.dtype) * _spread(scale, x) + _spread(shift, x)
        out = (F.relu(out) if relu else out).to(x.dtype).flatten(0, 1)
        ctx.save_for_backward(x, mean, var, scale, shift)
        ctx.eps, ctx.relu, ctx.kernels = eps, relu, kernels
        ctx.mark_non_differentiable(mean, var)
        return out, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dx = w s (g - sum g / N - z sum(g z) / N), z = (x - mean) s, s = 1 / sqrt(var + eps)."""
        x, mean, var, scale, shift = ctx.saved_tensors
        parts = mean.shape[0]
        count = x.numel() // (x.shape[1] * parts)
        inverse = (var + ctx.eps).rsqrt()
        total, product = _grad_moments(grads[0], x, mean, scale, shift, relu=ctx.relu, kernels=ctx.kernels)
        slope = product * inverse  # sum of g z
        split, value = _let_through(
            _by_batch(grads[0], parts), _by_batch(x, parts).to(mean.dtype), scale, shift, ctx.relu
        )
        # One factor per channel for g, for x, and a constant.
        of_x = -scale * inverse * slope / count
        rest = -scale * total / count - of_x * mean
        dx = split * _spread(scale, x) + value * _spread(of_x, x) + _spread(rest, x)
        return dx.to(x.dtype).flatten(0, 1), slope.sum(0), total.sum(0), None, None, None, None


def usual(norm: nn.Module) -> bool:
    """A BatchNorm as nearly all are: with weights and running statistics that are averaged exponentially."""
    whole = type(norm) in NORMS and norm.weight is not None and norm.running_mean is not None
    return whole and norm.momentum is not None


def normalised(norm: nn.Module, x: Tensor, *, parts: int, relu: bool, kernels: bool) -> Tensor:
    """What this BatchNorm in train mode, and a ReLU behind it, give for `parts` batches, each by its own statistics.

    Running statistics are taken over batch by batch: r <- (1 - m) r + m (mean or unbiased variance).
    """
    assert isinstance(norm, NORMS)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    found = _Normalised.apply(x, norm.weight, norm.bias, parts, norm.eps, relu, kernels)  # type: ignore[no-untyped-call]
    out, mean, var = found
    count = x.numel() // (x.shape[1] * parts)
    with torch.no_grad():
        for i in range(parts):
            norm.running_mean.lerp_(mean[i].to(norm.running_mean.dtype), norm.momentum)
            norm.running_var.lerp_((var[i] * (count / (count - 1))).to(norm.running_var.dtype), norm.momentum)
        norm.num_batches_tracked.add_(parts)
    assert isinstance(out, Tensor)
    return out
