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
def _merge_moments(
    means, squares, weight, bias, running_mean, running_var, counter, mean, inverse, scale, shift, piece, pieces,
    channels, eps, momentum, PARTS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * C + tl.arange(0, C)
    inside = channel < channels
    number = tl.arange(0, P)
    there = (number < pieces)[:, None] & inside[None, :]
    w = tl.load(weight + channel, mask=inside, other=0.0)
    b = tl.load(bias + channel, mask=inside, other=0.0)
    kept_mean = tl.load(running_mean + channel, mask=inside, other=0.0)
    kept_var = tl.load(running_var + channel, mask=inside, other=0.0)
    for part in tl.static_range(PARTS):
        at = (part * pieces + number)[:, None] * channels + channel[None, :]
        each = tl.load(means + at, mask=there, other=0.0)
        middle = tl.sum(each, 0) / pieces
        apart = tl.where(there, each - middle[None, :], 0.0)
        # Squares within the pieces, and those of their means.
        total = tl.sum(tl.load(squares + at, mask=there, other=0.0), 0) + piece * tl.sum(apart * apart, 0)
        over = 1 / tl.sqrt(total / (piece * pieces) + eps)
        at = part * channels + channel
        tl.store(mean + at, middle, mask=inside)
        tl.store(inverse + at, over, mask=inside)
        tl.store(scale + at, w * over, mask=inside)
        tl.store(shift + at, b - middle * w * over, mask=inside)
        kept_mean += momentum * (middle - kept_mean)
        kept_var += momentum * (total / (piece * pieces - 1) - kept_var)
    tl.store(running_mean + channel, kept_mean, mask=inside)
    tl.store(running_var + channel, kept_var, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(counter, tl.load(counter) + PARTS)


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


@triton.jit
def _merge_grads(
    totals, products, mean, inverse, scale, weight, bias, of_x, rest, piece, pieces, channels, PARTS: tl.constexpr,
    P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * C + tl.arange(0, C)
    inside = channel < channels
    number = tl.arange(0, P)
    there = (number < pieces)[:, None] & inside[None, :]
    slopes = tl.zeros([C], tl.float32)
    sums = tl.zeros([C], tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * pieces + number)[:, None] * channels + channel[None, :]
        total = tl.sum(tl.load(totals + at, mask=there, other=0.0), 0)
        product = tl.sum(tl.load(products + at, mask=there, other=0.0), 0)
        at = part * channels + channel
        over = tl.load(inverse + at, mask=inside, other=0.0)
        a = tl.load(scale + at, mask=inside, other=0.0)
        slope = product * over
        factor = -a * over * slope / (piece * pieces)
        middle = tl.load(mean + at, mask=inside, other=0.0)
        tl.store(of_x + at, factor, mask=inside)
        tl.store(rest + at, -a * total / (piece * pieces) - factor * middle, mask=inside)
        slopes += slope
        sums += total
    tl.store(weight + channel, slopes, mask=inside)
    tl.store(bias + channel, sums, mask=inside)


def _cut(x: Tensor, parts: int) -> tuple[int, int, tuple[int, int]]:
    """Pieces of a batch, their rows, and the tile of a program: pieces are equal, so powers of two that divide."""
    channels = x.shape[1]
    rows = x.numel() // channels // parts
    wide = triton.next_power_of_2(min(channels, WIDE))
    high = TILE // wide
    most = min(rows // high, PROGRAMS // (parts * triton.cdiv(channels, wide)))
    pieces = 1
    while rows % (2 * pieces) == 0 and 2 * pieces <= most:
        pieces *= 2
    return pieces, rows // pieces, (high, wide)


def _room(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("flatrock::moments", mutates_args=("running_mean", "running_var", "counter"))
def moments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    counter: Tensor,
    parts: int,
    eps: float,
    momentum: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean m and 1 / sqrt(var + eps) [parts, c] of every batch, and a = weight / sqrt(var + eps), b = bias - m a.

    Running statistics take over one batch after the other, and the counter of batches moves on.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    channels = x.shape[1]
    pieces, piece, tile = _cut(x, parts)
    means, squares = (_room(x, parts, pieces, channels) for _ in range(2))
    mean, inverse, scale, shift = (_room(x, parts, channels) for _ in range(4))
    grid = parts * pieces, triton.cdiv(channels, tile[1])
    last = (triton.cdiv(channels, MERGED),)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton launches where torch is, not where the tensors are
        _moments[grid](x, means, squares, piece, channels, *tile, num_warps=WARPS)
        _merge_moments[last](
            means, squares, weight, bias, running_mean, running_var, counter, mean, inverse, scale, shift, piece,
            pieces, channels, eps, momentum, parts, triton.next_power_of_2(pieces), MERGED,
        )  # fmt: skip
    return mean, inverse, scale, shift


@torch.library.custom_op("flatrock::grad_moments", mutates_args=())
def grad_moments(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor, shift: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of weight and bias [c], sum(g z) and sum(g); and factors of that of x, dx = scale g + of_x x + rest.

    g is the gradient behind the BatchNorm: 0 where x * scale + shift <= 0 if `relu`. With z = (x - mean) inverse and N
    entries to a batch, dx = scale (g - sum(g) / N - z sum(g z) / N).
    """
    parts, channels = mean.shape
    grad, x = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (grad, x))
    mean, inverse, scale, shift = (tensor.contiguous() for tensor in (mean, inverse, scale, shift))
    pieces, piece, tile = _cut(x, parts)
    totals, products = (_room(x, parts, pieces, channels) for _ in range(2))
    weight, bias = _room(x, channels), _room(x, channels)
    of_x, rest = _room(x, parts, channels), _room(x, parts, channels)
    grid = parts * pieces, triton.cdiv(channels, tile[1])
    last = (triton.cdiv(channels, MERGED),)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _grad_moments[grid](
            grad, x, mean, scale, shift, totals, products, piece, pieces, channels, relu, *tile, num_warps=WARPS
        )
        _merge_grads[last](
            totals, products, mean, inverse, scale, weight, bias, of_x, rest, piece, pieces, channels, parts,
            triton.next_power_of_2(pieces), MERGED,
        )  # fmt: skip
    return weight, bias, of_x, rest


@moments.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    counter: Tensor,
    parts: int,
    eps: float,
    momentum: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = parts, x.shape[1]
    return _room(x, *shape), _room(x, *shape), _room(x, *shape), _room(x, *shape)


@grad_moments.register_fake
def _(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor, shift: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels = x.shape[1]
    return _room(x, channels), _room(x, channels), _room(x, *mean.shape), _room(x, *mean.shape)
