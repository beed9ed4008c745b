"""max(x * scale + shift, 0) per channel and its derivative as Triton kernels; imported only beside a GPU.

Tensors are seen as [rows, channels] with channels innermost. Arithmetic is float32 whatever the tensors hold.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows and channels of the tile one program works on.
ROWS, CHANNELS = 64, 64


@triton.jit  # type: ignore[untyped-decorator]
def _forward(x, scale, shift, out, rows, channels, relu: tl.constexpr, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    there = (row < rows)[:, None] & (channel < channels)[None, :]
    at = row[:, None] * channels + channel[None, :]
    a = tl.load(scale + channel, mask=channel < channels, other=0.0)
    b = tl.load(shift + channel, mask=channel < channels, other=0.0)
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * a[None, :] + b[None, :]
    if relu:
        value = tl.where(value < 0, 0.0, value)  # a comparison, not a maximum: NaN stays NaN
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(grad, out, scale, result, rows, channels, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    there = (row < rows)[:, None] & (channel < channels)[None, :]
    at = row[:, None] * channels + channel[None, :]
    a = tl.load(scale + channel, mask=channel < channels, other=0.0)
    value = tl.load(grad + at, mask=there, other=0.0).to(tl.float32) * a[None, :]
    open_ = tl.load(out + at, mask=there, other=0.0) > 0
    tl.store(result + at, tl.where(open_, value, 0.0).to(result.dtype.element_ty), mask=there)


def _dense(x: Tensor) -> Tensor:
    """The tensor with channels innermost."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()


def _grid(x: Tensor) -> tuple[int, int, tuple[int, int]]:
    channels = x.shape[1]
    rows = x.numel() // channels
    return rows, channels, (triton.cdiv(rows, ROWS), triton.cdiv(channels, CHANNELS))


def affine(x: Tensor, scale: Tensor, shift: Tensor, *, relu: bool) -> Tensor:
    """x * scale + shift per channel (axis 1), with negative values set to 0 if `relu`."""
    x = _dense(x)
    out = torch.empty_like(x)
    rows, channels, grid = _grid(x)
    _forward[grid](x, scale, shift, out, rows, channels, relu, ROWS, CHANNELS)
    return out


def affine_relu_backward(grad: Tensor, out: Tensor, scale: Tensor) -> Tensor:
    """Gradient of the input: grad * scale where the output is positive."""
    grad = _dense(grad)
    result = torch.empty_like(grad)
    rows, channels, grid = _grid(grad)
    _backward[grid](grad, out, scale, result, rows, channels, ROWS, CHANNELS)
    return result
