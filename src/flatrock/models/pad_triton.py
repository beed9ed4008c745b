"""Images to what tensor cores read, and gradients back, as Triton kernels; imported only beside a GPU."""

# Triton reads the source of its kernels: annotations that mean nothing to it stay out.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatrock.core.layout import layout_of

# Pixels one program works on.
PIXELS = 256


@triton.jit
def _copy(
    source, target, rows, pixels, there, channels, from_image, from_pixel, from_channel, to_image, to_pixel, to_channel,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Pixels of all images, channel by channel; channels the source does not have are 0, those of no target left."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    channel = tl.arange(0, C)[None, :]
    image, pixel = (row // pixels)[:, None], (row % pixels)[:, None]
    inside = (row < rows)[:, None]
    at = image * from_image + pixel * from_pixel + channel * from_channel
    value = tl.load(source + at, mask=inside & (channel < there), other=0.0)
    at = image * to_image + pixel * to_pixel + channel * to_channel
    tl.store(target + at, value.to(target.dtype.element_ty), mask=inside & (channel < channels))


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Steps in memory from image to image, pixel to pixel and channel to channel."""
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    last = layout_of(x) is torch.channels_last
    return channels * pixels, channels if last else 1, 1 if last else pixels


def copy_channels(source: Tensor, target: Tensor) -> None:
    """Copy images [n, c, h, w] into others with more or fewer channels, of any dtype; missing channels become 0."""
    source = source.contiguous(memory_format=layout_of(source))
    n, there, h, w = source.shape
    channels = target.shape[1]
    rows = n * h * w
    with torch.cuda.device_of(source):  # type: ignore[no-untyped-call]  # Triton launches where torch is, not where the tensors are
        _copy[(triton.cdiv(rows, PIXELS),)](
            source, target, rows, h * w, there, channels, *_strides(source), *_strides(target), PIXELS,
            triton.next_power_of_2(channels),
        )  # fmt: skip
