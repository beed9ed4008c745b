"""BatchNorm in train mode and the ReLU behind it as one operation over several batches in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class PromptNorm2d(nn.BatchNorm2d):
    """BatchNorm whose running statistics are those of the last batch while it has seen no more than `first`.

    So they begin at statistics of real inputs, not at mean 0 and variance 1: momentum 1 in the first step of training,
    then a small one (Gowal et al. 2020). The counter of batches lies on the device, and so does the choice: nobody
    waits for a GPU.
    """

    def __init__(self, channels: int, *, momentum: float, first: int) -> None:
        super().__init__(channels, momentum=momentum)
        self.first = first

    def forward(self, input: Tensor) -> Tensor:
        """What BatchNorm gives; in train mode the running statistics take the batch over."""
        if not self.training or self.momentum is None:  # None: a plain mean over all batches, whoever wants that
            return super().forward(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        running = self.running_mean, self.running_var
        seen = torch.zeros_like(running[0]), torch.zeros_like(running[1])
        out = F.batch_norm(input, *seen, self.weight, self.bias, True, 1.0, self.eps)
        _take_over(running, seen, self.num_batches_tracked < self.first, self.momentum)
        self.num_batches_tracked.add_(1)
        return out

    def extra_repr(self) -> str:
        """As torch prints a BatchNorm, and what is new."""
        return f"{super().extra_repr()}, first={self.first}"  # type: ignore[no-untyped-call]


@torch.no_grad()
def _take_over(running: Sequence[Tensor], seen: Sequence[Tensor], early: Tensor, momentum: float) -> None:
    """r <- s where `early`, else (1 - m) r + m s."""
    for kept, new in zip(running, seen, strict=True):
        found = new.to(kept.dtype)
        kept.copy_(torch.where(early, found, kept.lerp(found, momentum)))


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, PromptNorm2d)


def _by_batch(x: Tensor, parts: int) -> Tensor:
    """[parts * n, c, ...] as [parts, n, c, ...]."""
    return x.view(parts, x.shape[0] // parts, *x.shape[1:])


def _spread(values: Tensor, x: Tensor) -> Tensor:
    """[parts, c], to be combined with what `_by_batch` makes of x."""
    return values.reshape(values.shape[0], 1, values.shape[1], *[1] * (x.dim() - 2))


def _count(x: Tensor, parts: int) -> int:
    """Entries of a channel in one batch."""
    return x.numel() // (x.shape[1] * parts)


def _axes(split: Tensor) -> list[int]:
    """Those of the samples of a batch and their pixels; not those of batches and channels."""
    return [1, *range(3, split.dim())]


def _moments(
    x: Tensor, weight: Tensor, bias: Tensor, running: Sequence[Tensor], parts: int, eps: float, momentum: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `norm_triton.moments` gives and does, in torch."""
    kind = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    split = _by_batch(x, parts).to(kind)
    var, mean = torch.var_mean(split, _axes(split), correction=0)
    inverse = (var + eps).rsqrt()
    count = _count(x, parts)
    for i in range(parts):
        running[0].lerp_(mean[i].to(running[0].dtype), momentum)
        running[1].lerp_((var[i] * (count / (count - 1))).to(running[1].dtype), momentum)
    running[2].add_(parts)
    return mean, inverse, weight * inverse, bias - mean * weight * inverse


def _grad_moments(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor, shift: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `norm_triton.grad_moments` gives, in torch."""
    parts = mean.shape[0]
    value = _by_batch(x, parts).to(mean.dtype)
    passed = _let_through(_by_batch(grad, parts), value, scale, shift, relu)
    total = passed.sum(_axes(passed))
    slope = (passed * (value - _spread(mean, x))).sum(_axes(passed)) * inverse  # of g z
    of_x = -scale * inverse * slope / _count(x, parts)
    return slope.sum(0), total.sum(0), of_x, -scale * total / _count(x, parts) - of_x * mean


def _let_through(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> Tensor:
    """The gradient that the ReLU lets through to the BatchNorm; both by batch."""
    grad = grad.to(x.dtype)
    return torch.where(x * _spread(scale, x[0]) + _spread(shift, x[0]) <= 0, 0, grad) if relu else grad


class _Normalised(torch.autograd.Function):
    """relu(z weight + bias), z = (x - mean) / sqrt(var + eps), mean and variance of every batch for itself.

    Only sums over a batch need kernels of their own: the rest is arithmetic per entry, which a compiler puts together
    with what stands before and behind. The mask of the ReLU is computed again, not kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        counter: Tensor,
        how: tuple[int, float, float, int, bool, bool],
    ) -> Tensor:
        parts, eps, momentum, first, relu, kernels = how
        # Kernels know one momentum: where the first batches have another, what they take over is thrown away.
        kept = (running_mean, running_var) if first == 0 else (running_mean.clone(), running_var.clone())
        before = counter.clone() if first else counter
        if kernels:
            from flatrock.models.norm_triton import moments

            found = moments(x, weight, bias, *kept, counter, parts, eps, momentum)
        else:
            found = _moments(x, weight, bias, (*kept, counter), parts, eps, momentum)
        mean, inverse, scale, shift = found
        if first:
            # Rounding can make it less than 0 where all entries of a channel are alike.
            var = (inverse.pow(-2) - eps).clamp_min(0) * (_count(x, parts) / (_count(x, parts) - 1))
            for i in range(parts):
                _take_over((running_mean, running_var), (mean[i], var[i]), before + i < first, momentum)
        out = _by_batch(x, parts).to(scale.dtype) * _spread(scale, x) + _spread(shift, x)
        ctx.save_for_backward(x, mean, inverse, scale, shift)
        ctx.relu, ctx.kernels = relu, kernels
        return (F.relu(out) if relu else out).to(x.dtype).flatten(0, 1)

    @staticmethod
    @once_differentiable  # the sums are taken as constants: second derivatives would be wrong
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dx = scale g + of_x x + rest: see `norm_triton.grad_moments`."""
        x, mean, inverse, scale, shift = ctx.saved_tensors
        if ctx.kernels:
            from flatrock.models.norm_triton import grad_moments

            found = grad_moments(grads[0], x, mean, inverse, scale, shift, ctx.relu)
        else:
            found = _grad_moments(grads[0], x, mean, inverse, scale, shift, ctx.relu)
        weight, bias, of_x, rest = found
        parts = mean.shape[0]
        value = _by_batch(x, parts).to(mean.dtype)
        passed = _let_through(_by_batch(grads[0], parts), value, scale, shift, ctx.relu)
        dx = passed * _spread(scale, x) + value * _spread(of_x, x) + _spread(rest, x)
        return dx.to(x.dtype).flatten(0, 1), weight, bias, None, None, None, None


def usual(norm: nn.Module) -> bool:
    """A BatchNorm as nearly all are: with weights and running statistics that are averaged exponentially."""
    if type(norm) not in NORMS or norm.momentum is None:
        return False
    held = norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked
    return all(tensor is not None for tensor in held)


def normalised(norm: nn.Module, x: Tensor, *, parts: int, relu: bool, kernels: bool) -> Tensor:
    """What this BatchNorm in train mode, and a ReLU behind it, give for `parts` batches, each by its own statistics.

    Running statistics are taken over batch by batch: r <- (1 - m) r + m (mean or unbiased variance); the first batches
    of a `PromptNorm2d` have m = 1.
    """
    assert isinstance(norm, NORMS)
    how = parts, norm.eps, norm.momentum, getattr(norm, "first", 0), relu, kernels
    given = x, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked
    out: Tensor = _Normalised.apply(*given, how)  # type: ignore[no-untyped-call]
    return out
