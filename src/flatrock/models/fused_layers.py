"""Layers that do in one pass over memory what several layers of a network in eval mode do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.core.device import has_triton
from flatrock.core.layout import layout_of
from flatrock.models.compare import hooked
from flatrock.models.norm import NORMS
from flatrock.models.turned import input_gradient, room_for_turned, turn, turnable

# Tensor cores take channels in groups of this many.
GROUP = 8


def _like(values: Tensor, x: Tensor) -> Tensor:
    """One value per channel (axis 1), to be combined with x."""
    return values.reshape(-1, *[1] * (x.dim() - 2))


class _Kernel(torch.autograd.Function):
    """The Triton kernels; the mask of the ReLU is read off the output, which lives on as the next layer's input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, scale: Tensor, shift: Tensor, relu: bool, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        from flatrock.models.affine_triton import affine

        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton launches where torch is, not where the tensors are
            out, total = affine(x, y, scale, shift, relu=relu, keep=keep)
        ctx.save_for_backward(scale, out if relu else None)
        ctx.two = y is not None
        ctx.set_materialize_grads(False)
        return out, out.view_as(out), total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        from flatrock.models.affine_triton import affine_backward

        scale, out = ctx.saved_tensors
        grad, again, more = grads
        if grad is None:
            grad, again = again, None
        with torch.cuda.device_of(scale):  # type: ignore[no-untyped-call]
            result = more if grad is None else affine_backward(grad, again, out, scale, more)
        return result, result if ctx.two else None, None, None, None, None


class Affine(nn.Module):
    """(x + y) * scale + shift per channel, then ReLU if asked for: a BatchNorm with fixed statistics, behind a sum.

    scale = weight / sqrt(var + eps), shift = bias - mean * scale. Both are plain attributes, not buffers: rounding
    the network to half precision must not round them. With `twice` the result is returned a second time, for a second
    reader: the kernel adds up their gradients. With `keep` the sum x + y is returned too. `source` is the name of the
    BatchNorm in its network.
    """

    def __init__(
        self, norm: nn.Module, source: str, *, relu: bool = False, twice: bool = False, keep: bool = False
    ) -> None:
        super().__init__()
        assert isinstance(norm, NORMS)
        assert norm.running_var is not None
        # Reduced precision never gets below float32 here, and double stays double.
        kind = torch.promote_types(norm.running_var.dtype, torch.float32)
        self.scale, self.shift = (torch.empty_like(norm.running_var, dtype=kind) for _ in range(2))
        self.source, self.relu, self.twice, self.keep = source, relu, twice, keep
        follow([self], [norm])

    def forward(self, input: Tensor, y: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """In float32 or better (kernels: float32); the results have the dtype of the input."""
        x = input
        if x.is_cuda and x.dim() in (2, 4) and has_triton() and (y is None or y.shape == x.shape):
            out, again, total = _Kernel.apply(x, y, self.scale, self.shift, self.relu, self.keep)  # type: ignore[no-untyped-call]
        else:
            total = x if y is None else x + y
            out = (total * _like(self.scale, total) + _like(self.shift, total)).to(total.dtype)
            out = again = F.relu(out) if self.relu else out
        wanted = (out, *([again] if self.twice else []), *([total] if self.keep else []))
        return wanted if len(wanted) > 1 else out


class _ConvKernel(torch.autograd.Function):
    """cuDNN's convolution + bias + ReLU; the mask of the ReLU is read off the output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, turned: Tensor | None, how: tuple[Any, Any, Any]
    ) -> Tensor:
        out: Tensor = torch.cudnn_convolution_relu(x, weight, bias, *how, 1)
        ctx.save_for_backward(x, weight, turned, out)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        from flatrock.models.affine_triton import affine_backward

        x, weight, turned, out = ctx.saved_tensors
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            grad = affine_backward(grads[0], None, out, None, None)
        if turned is not None:
            return input_gradient(grad, turned, ctx.how[1]), None, None, None, None
        alone = True, False, False  # the gradient of the input, not those of weight and bias
        found = torch.ops.aten.convolution_backward(grad, x, weight, None, *ctx.how, False, (0, 0), 1, alone)
        return found[0], None, None, None, None


class FoldedConv(nn.Module):
    """max(conv(x) * scale + shift, 0): a convolution, the BatchNorm (fixed statistics) and the ReLU behind it.

    The factors are in the weights, w'_c = scale_c w_c, the rest in the bias, b'_c = shift_c + scale_c b_c: on a GPU
    in half precision all is one kernel of cuDNN. Only gradients of the input exist there. `source` is the name of the
    convolution in its network.
    """

    def __init__(self, conv: nn.Conv2d, source: str, norm: Affine) -> None:
        super().__init__()
        self.source, self.norm = source, norm
        self.weight = nn.Parameter(torch.empty_like(conv.weight))
        self.bias = nn.Parameter(torch.empty_like(norm.shift, dtype=conv.weight.dtype))
        self.how: tuple[Any, Any, Any] = conv.stride, conv.padding, conv.dilation
        self.register_buffer("turned", room_for_turned(conv.weight) if turnable(conv) else None, persistent=False)
        self.turned: Tensor | None
        refold([self], [conv.weight], [conv.bias])

    def forward(self, x: Tensor) -> Tensor:
        """What the three layers give."""
        halves = x.dtype in (torch.float16, torch.bfloat16) and x.dtype == self.weight.dtype
        if x.is_cuda and halves and torch.backends.cudnn.enabled and has_triton():
            out: Tensor = _ConvKernel.apply(x, self.weight, self.bias, self.turned, self.how)  # type: ignore[no-untyped-call]
            return out
        return F.relu(F.conv2d(x, self.weight, self.bias, *self.how))


class _Widened(torch.autograd.Function):
    """Images with zero channels beside theirs, in dtype and layout of a convolution's weights: one kernel each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, missing: int, weight: Tensor) -> Tensor:
        from flatrock.models.pad_triton import copy_channels

        shape = x.shape[0], x.shape[1] + missing, *x.shape[2:]
        out = torch.empty(shape, dtype=weight.dtype, device=x.device, memory_format=layout_of(weight))
        copy_channels(x, out)
        ctx.like = x.shape, x.dtype, layout_of(x)  # of the gradient
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from flatrock.models.pad_triton import copy_channels

        shape, dtype, layout = ctx.like
        grad = torch.empty(shape, dtype=dtype, device=grads[0].device, memory_format=layout)
        copy_channels(grads[0], grad)
        return grad, None, None


class PaddedConv(nn.Module):
    """A convolution of few channels with zero channels beside them: tensor cores want groups of 8.

    Its inputs may have another dtype than its weights, whose dtype the result has.
    """

    def __init__(self, conv: nn.Conv2d, source: str) -> None:
        super().__init__()
        self.source = source
        self.missing = -conv.in_channels % GROUP
        self.weight = nn.Parameter(F.pad(conv.weight.detach(), (0, 0, 0, 0, 0, self.missing)))
        self.bias = None if conv.bias is None else nn.Parameter(conv.bias.detach())
        self.how: dict[str, Any] = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}

    def forward(self, x: Tensor) -> Tensor:
        """What the convolution gives."""
        if x.is_cuda and x.dim() == 4 and has_triton():
            wide: Tensor = _Widened.apply(x, self.missing, self.weight)  # type: ignore[no-untyped-call]
        else:
            wide = F.pad(x.to(self.weight.dtype), (0, 0, 0, 0, 0, self.missing))
        return F.conv2d(wide, self.weight, self.bias, **self.how)


def follow(affines: Sequence[Affine], norms: Sequence[nn.Module]) -> None:
    """Take over what these BatchNorms hold now: scale = weight / sqrt(var + eps), shift = bias - mean * scale.

    All layers together, in a few launches; scale and shift stay where they are in memory.
    """
    pairs = [(a, n) for a, n in zip(affines, norms, strict=True) if isinstance(n, NORMS)]
    if not pairs:
        return

    def held(name: str) -> list[Tensor]:
        return [value.to(a.scale.dtype) for a, n in pairs if (value := getattr(n, name)) is not None]

    with torch.no_grad():
        scale = list(torch._foreach_add(held("running_var"), [n.eps for _, n in pairs]))
        torch._foreach_rsqrt_(scale)
        with_weight = [s for s, (_, n) in zip(scale, pairs, strict=True) if n.weight is not None]
        if with_weight:
            torch._foreach_mul_(with_weight, held("weight"))
        shift = list(torch._foreach_mul(held("running_mean"), scale))
        torch._foreach_neg_(shift)
        with_bias = [s for s, (_, n) in zip(shift, pairs, strict=True) if n.bias is not None]
        if with_bias:
            torch._foreach_add_(with_bias, held("bias"))
        torch._foreach_copy_([a.scale for a, _ in pairs], scale)
        torch._foreach_copy_([a.shift for a, _ in pairs], shift)


@torch.no_grad()
def refold(layers: Sequence[FoldedConv], weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """Fold the factors of now into these weights and biases; what the layers hold stays where it is in memory."""
    if not layers:
        return
    scales, shifts = [f.norm.scale for f in layers], [f.norm.shift for f in layers]
    folded = torch._foreach_mul(list(weights), [scale.reshape(-1, 1, 1, 1) for scale in scales])
    torch._foreach_copy_([f.weight for f in layers], folded)
    moved = [s if b is None else s + a * b for a, s, b in zip(scales, shifts, biases, strict=True)]
    torch._foreach_copy_([f.bias for f in layers], moved)
    both = [(f.turned, f.weight) for f in layers if f.turned is not None]
    turn([turned for turned, _ in both], [weight for _, weight in both])


def fixed(module: nn.Module) -> bool:
    """A BatchNorm that uses its running statistics; one that does more, by subclass or hook, is left alone."""
    plain = type(module) in NORMS and not hooked(module)
    return plain and module.running_mean is not None and not module.training


def foldable(module: nn.Module) -> bool:
    """A convolution that `FoldedConv` can stand in for."""
    usual = type(module) is nn.Conv2d and module.groups == 1 and _zeros(module)
    return usual and not isinstance(module.padding, str)


def narrow(module: nn.Module) -> bool:
    """A convolution that `PaddedConv` can stand in for, with too few channels for tensor cores."""
    return type(module) is nn.Conv2d and module.in_channels < GROUP and module.groups == 1 and _zeros(module)


def _zeros(conv: nn.Conv2d) -> bool:
    return conv.padding_mode == "zeros"
