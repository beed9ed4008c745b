"""Sums over a batch, per channel, as Triton kernels; imported only beside a GPU.

Tensors are seen as [rows, channels] with channels innermost; batches follow each other. A batch is cut into equal
pieces, one program each (and per tile of channels); whoever calls adds up the pieces. Arithmetic is float32.
"""

# Triton reads the source of its kernels: annotations that mean nothing to it stay out.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs wanted (the GPU has 132 processors), entries of the tile a program holds at once, and its width in channels
# where that leaves no rest, else at most.
PROGRAMS, TILE = 528, 4096
WIDE, WIDEST = 64, 32
WARPS = 8


@triton.jit
def _moments(x, means, squares, piece, channels, R: tl.constexpr, C: tl.constexpr):
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < channels
    begin = tl.program_id(0).to(tl.int64) * piece
    # Sums of differences to a value of the piece: squares of large means would leave no digits for the variance.
    pivot = tl.load(x + begin * channels + channel, mask=inside, other=0.0).to(tl.float32)
    first = tl.zeros([R, C], tl.float32)
    second = tl.zeros([R, C], tl.float32)
    for start in range(0, piece, R):
        row = start + tl.arange(0, R)
        there = (row < piece)[:, None] & inside[None, :]
        at = (begin + row)[:, None] * channels + channel[None, :]
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        value = tl.where(there, value - pivot[None, :], 0.0)
        first += value
        second += value * value
    total = tl.sum(first, 0)
    at = tl.program_id(0) * channels + channel
    tl.store(means + at, pivot + total / piece, mask=inside)
    tl.store(squares + at, tl.sum(second, 0) - total * total / piece, mask=inside)


@triton.jit
def _grad_moments(
    grad, x, mean, scale, shift, totals, products, piece, pieces, channels, RELU: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < channels
    begin = tl.program_id(0).to(tl.int64) * piece
    of_batch = tl.program_id(0) // pieces * channels + channel
    m = tl.load(mean + of_batch, mask=inside, other=0.0)
    a = tl.load(scale + of_batch, mask=inside, other=0.0)
    b = tl.load(shift + of_batch, mask=inside, other=0.0)
    first = tl.zeros([R, C], tl.float32)
    second = tl.zeros([R, C], tl.float32)
    for start in range(0, piece, R):
        row = start + tl.arange(0, R)
        there = (row < piece)[:, None] & inside[None, :]
        at = (begin + row)[:, None] * channels + channel[None, :]
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        slope = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
        if RELU:
            slope = tl.where(value * a[None, :] + b[None, :] <= 0, 0.0, slope)
        first += slope
        second += slope * (value - m[None, :])
    at = tl.program_id(0) * channels + channel
    tl.store(totals + at, tl.sum(first, 0), mask=inside)
    tl.store(products + at, tl.sum(second, 0), mask=inside)


def _cut(x: Tensor, parts: int) -> tuple[int, int, tuple[int, int]]:
    """Pieces of a batch, their rows, and the tile of a program: pieces are equal, so powers of two that divide."""
    channels = x.shape[1]
    rows = x.numel() // channels // parts
    wide = WIDE if channels % WIDE == 0 else triton.next_power_of_2(min(channels, WIDEST))
    high = TILE // wide
    pieces = 1
    while (
        rows % (2 * pieces) == 0
        and rows // (2 * pieces) >= high
        and 2 * pieces * parts * triton.cdiv(channels, wide) <= PROGRAMS
    ):
        pieces *= 2
    return pieces, rows // pieces, (high, wide)


def _results(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    shape = parts, _cut(x, parts)[0], x.shape[1]
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("flatrock::moments", mutates_args=())
def moments(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Means and sums of squared differences to them [parts, pieces, c], by piece of a batch."""
    x = x.contiguous(memory_format=torch.channels_last)
    means, squares = _results(x, parts)
    pieces, piece, tile = _cut(x, parts)
    grid = parts * pieces, triton.cdiv(x.shape[1], tile[1])
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton launches where torch is, not where the tensors are
        _moments[grid](x, means, squares, piece, x.shape[1], *tile, num_warps=WARPS)
    return means, squares


@torch.library.custom_op("flatrock::grad_moments", mutates_args=())
def grad_moments(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Sums [parts, pieces, c] of g and g * (x - mean) by piece of a batch; g is 0 where x * scale + shift <= 0."""
    parts = mean.shape[0]
    grad, x = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (grad, x))
    mean, scale, shift = (tensor.contiguous() for tensor in (mean, scale, shift))
    totals, products = _results(x, parts)
    pieces, piece, tile = _cut(x, parts)
    grid = parts * pieces, triton.cdiv(x.shape[1], tile[1])
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _grad_moments[grid](
            grad, x, mean, scale, shift, totals, products, piece, pieces, x.shape[1], relu, *tile, num_warps=WARPS
        )
    return totals, products


@moments.register_fake
def _(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    return _results(x, parts)


@grad_moments.register_fake
def _(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    return _results(x, mean.shape[0])
