"""Sums over a batch, per channel, as Triton kernels; imported only beside a GPU.

Tensors are seen as [rows, channels] with channels innermost; batches follow each other. A batch is cut into equal
pieces, one program each (and per tile of channels); a second kernel puts the pieces together. Arithmetic is float32.
"""

# Triton reads the source of its kernels: annotations that mean nothing to it stay out.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# At most so many programs (an H200 has 132 processors), entries of the tile a program holds at once, its channels, and
# its warps; channels of a program that puts pieces together. Found by trying PreActResNet-18 and WRN-34-10 on an H200.
PROGRAMS, TILE, WIDE, WARPS = 264, 8192, 32, 4
MERGED = 16


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
def _merge_moments(means, squares, mean, var, piece, pieces, channels, P: tl.constexpr, C: tl.constexpr):
    channel = tl.program_id(1) * C + tl.arange(0, C)
    number = tl.arange(0, P)
    there = (number < pieces)[:, None] & (channel < channels)[None, :]
    at = (tl.program_id(0) * pieces + number)[:, None] * channels + channel[None, :]
    each = tl.load(means + at, mask=there, other=0.0)
    middle = tl.sum(each, 0) / pieces
    apart = tl.where(there, each - middle[None, :], 0.0)
    within = tl.sum(tl.load(squares + at, mask=there, other=0.0), 0) / piece
    at = tl.program_id(0) * channels + channel
    tl.store(mean + at, middle, mask=channel < channels)
    tl.store(var + at, (within + tl.sum(apart * apart, 0)) / pieces, mask=channel < channels)


@triton.jit
def _merge_sums(firsts, seconds, first, second, pieces, channels, P: tl.constexpr, C: tl.constexpr):
    channel = tl.program_id(1) * C + tl.arange(0, C)
    number = tl.arange(0, P)
    there = (number < pieces)[:, None] & (channel < channels)[None, :]
    at = (tl.program_id(0) * pieces + number)[:, None] * channels + channel[None, :]
    one = tl.sum(tl.load(firsts + at, mask=there, other=0.0), 0)
    two = tl.sum(tl.load(seconds + at, mask=there, other=0.0), 0)
    at = tl.program_id(0) * channels + channel
    tl.store(first + at, one, mask=channel < channels)
    tl.store(second + at, two, mask=channel < channels)


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
    wide = triton.next_power_of_2(min(channels, WIDE))
    high = TILE // wide
    pieces = 1
    while (
        rows % (2 * pieces) == 0
        and rows // (2 * pieces) >= high
        and 2 * pieces * parts * triton.cdiv(channels, wide) <= PROGRAMS
    ):
        pieces *= 2
    return pieces, rows // pieces, (high, wide)


def _pairs(x: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("flatrock::moments", mutates_args=())
def moments(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance [parts, c] of every batch."""
    x = x.contiguous(memory_format=torch.channels_last)
    channels = x.shape[1]
    pieces, piece, tile = _cut(x, parts)
    means, squares = _pairs(x, parts, pieces, channels)
    mean, var = _pairs(x, parts, channels)
    grid = parts * pieces, triton.cdiv(channels, tile[1])
    last = parts, triton.cdiv(channels, MERGED)
    high = triton.next_power_of_2(pieces)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton launches where torch is, not where the tensors are
        _moments[grid](x, means, squares, piece, channels, *tile, num_warps=WARPS)
        _merge_moments[last](means, squares, mean, var, piece, pieces, channels, high, MERGED)
    return mean, var


@torch.library.custom_op("flatrock::grad_moments", mutates_args=())
def grad_moments(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Sums [parts, c] of g and of g * (x - mean) over every batch; g is 0 where x * scale + shift <= 0 if `relu`."""
    parts, channels = mean.shape
    grad, x = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (grad, x))
    mean, scale, shift = (tensor.contiguous() for tensor in (mean, scale, shift))
    pieces, piece, tile = _cut(x, parts)
    totals, products = _pairs(x, parts, pieces, channels)
    total, product = _pairs(x, parts, channels)
    grid = parts * pieces, triton.cdiv(channels, tile[1])
    last = parts, triton.cdiv(channels, MERGED)
    high = triton.next_power_of_2(pieces)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _grad_moments[grid](
            grad, x, mean, scale, shift, totals, products, piece, pieces, channels, relu, *tile, num_warps=WARPS
        )
        _merge_sums[last](totals, products, total, product, pieces, channels, high, MERGED)
    return total, product


@moments.register_fake
def _(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    return _pairs(x, parts, x.shape[1])


@grad_moments.register_fake
def _(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    return _pairs(x, *mean.shape)
