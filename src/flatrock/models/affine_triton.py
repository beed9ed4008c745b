"""max((x + y) * scale + shift, 0) per channel and its derivative as Triton kernels; imported only beside a GPU.

Tensors are seen as [rows, channels] with channels innermost. Arithmetic is float32 whatever the tensors hold.
"""

# Triton reads the source of its kernels: annotations that mean nothing to it stay out.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Entries of the tile one program works on, forward and backward; how many channels wide where that leaves no rest, and
# at most where it does. Found by trying the layers of PreActResNet-18 and WRN-34-10 on an H200.
FORWARD, BACKWARD = 4096, 2048
WIDE, WIDEST = 64, 128


@triton.jit
def _forward(
    x, y, scale, shift, total, out, rows, channels, ADD: tl.constexpr, KEEP: tl.constexpr, RELU: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    there = (row < rows)[:, None] & (channel < channels)[None, :]
    at = row[:, None] * channels + channel[None, :]
    a = tl.load(scale + channel, mask=channel < channels, other=0.0)
    b = tl.load(shift + channel, mask=channel < channels, other=0.0)
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(y + at, mask=there, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(total + at, value.to(total.dtype.element_ty), mask=there)
    value = value * a[None, :] + b[None, :]
    if RELU:
        value = tl.where(value < 0, 0.0, value)  # a comparison, not a maximum: NaN stays NaN
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _backward(
    grad, again, out, scale, more, result, rows, channels, AGAIN: tl.constexpr, RELU: tl.constexpr,
    SCALED: tl.constexpr, MORE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    there = (row < rows)[:, None] & (channel < channels)[None, :]
    at = row[:, None] * channels + channel[None, :]
    value = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
    if AGAIN:
        value += tl.load(again + at, mask=there, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(scale + channel, mask=channel < channels, other=0.0)[None, :]
    if RELU:
        value = tl.where(tl.load(out + at, mask=there, other=0.0) > 0, value, 0.0)
    if MORE:
        value += tl.load(more + at, mask=there, other=0.0).to(tl.float32)
    tl.store(result + at, value.to(result.dtype.element_ty), mask=there)


def _dense(x: Tensor) -> Tensor:
    """The tensor with channels innermost."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()


def _shape(x: Tensor, entries: int) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """Rows, channels, the grid of programs, and the tile of so many entries each works on."""
    channels = x.shape[1]
    rows = x.numel() // channels
    wide = WIDE if channels % WIDE == 0 else triton.next_power_of_2(min(channels, WIDEST))
    tile = entries // wide, wide
    return rows, channels, (triton.cdiv(rows, tile[0]), triton.cdiv(channels, tile[1])), tile


def affine(
    x: Tensor, y: Tensor | None, scale: Tensor, shift: Tensor, *, relu: bool, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """(x + y) * scale + shift per channel (axis 1), negative values set to 0 if `relu`; and x + y if `keep`."""
    x = _dense(x)
    y = None if y is None else _dense(y)
    out = torch.empty_like(x)
    total = torch.empty_like(x) if keep else None
    rows, channels, grid, tile = _shape(x, FORWARD)
    _forward[grid](x, y, scale, shift, total, out, rows, channels, y is not None, keep, relu, *tile)
    return out, total


def affine_backward(
    grad: Tensor, again: Tensor | None, out: Tensor | None, scale: Tensor | None, more: Tensor | None
) -> Tensor:
    """Gradient of x and y: (grad + again) * scale, 0 where `out` (of a ReLU) is 0 or less, plus `more`.

    What is None is left out. `grad` and `again` come from two readers of the result, `more` from those of x + y.
    """
    grad = _dense(grad)
    again, out, more = (None if each is None else _dense(each) for each in (again, out, more))
    result = torch.empty_like(grad)
    rows, channels, grid, tile = _shape(grad, BACKWARD)
    given = (each is not None for each in (again, out, scale, more))
    _backward[grid](grad, again, out, scale, more, result, rows, channels, *given, *tile)
    return result
