"""Gradients of a convolution's inputs as a convolution forward, where the hardware is faster at that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Tiles of gradient kernels are this many channels wide, those of forward kernels come in 96 too: 160 channels fill two
# of the latter better. At 320 and 640 there is nothing to gain (fp16 on an H200: 131 to 116 us, 98 to 100, 92 to 99),
# and gradients of 1x1 convolutions are matrix products.
TILE = 64


def turnable(module: nn.Module) -> bool:
    """A convolution whose input gradient is a convolution of the same kind, and faster that way."""
    if type(module) is not nn.Conv2d or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return False
    odd = min(module.kernel_size) > 1 and module.in_channels > TILE and module.in_channels % TILE != 0
    plain = module.groups == 1 and set(module.stride) == set(module.dilation) == {1}
    fits = all(p <= k - 1 for p, k in zip(module.padding, module.kernel_size, strict=True))
    return odd and plain and fits


def room_for_turned(weight: Tensor) -> Tensor:
    """Where the turned weights of a convolution go; whoever rearranges the layer rearranges them too."""
    return torch.empty_like(weight.detach().transpose(0, 1), memory_format=torch.contiguous_format)


@torch.no_grad()
def turn(turned: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """w'[i, o, y, x] = w[o, i, k - 1 - y, k - 1 - x]: with these, gradients of outputs become those of inputs."""
    for mine, weight in zip(turned, weights, strict=True):
        mine.copy_(weight.transpose(0, 1).flip(2, 3))


def input_gradient(grad: Tensor, turned: Tensor, padding: Sequence[int]) -> Tensor:
    """Gradient of the inputs of a convolution of stride 1, given that of its outputs."""
    around = [k - 1 - p for k, p in zip(turned.shape[2:], padding, strict=True)]
    return F.conv2d(grad, turned, None, 1, around)


class _Turned(torch.autograd.Function):
    """A convolution with frozen weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, turned: Tensor, padding: Sequence[int]
    ) -> Tensor:
        ctx.save_for_backward(turned)
        ctx.padding = padding
        return F.conv2d(x, weight, bias, 1, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (turned,) = ctx.saved_tensors
        return input_gradient(grads[0], turned, ctx.padding), None, None, None, None


class TurnedConv(nn.Module):
    """A convolution that knows its turned weights, for gradients of its inputs; it has no others.

    `source` is its name in its network.
    """

    def __init__(self, conv: nn.Conv2d, source: str) -> None:
        super().__init__()
        self.source, self.padding = source, conv.padding
        self.weight = nn.Parameter(conv.weight.detach())
        self.bias = None if conv.bias is None else nn.Parameter(conv.bias.detach())
        self.register_buffer("turned", room_for_turned(conv.weight), persistent=False)
        self.turned: Tensor
        turn([self.turned], [self.weight])

    def forward(self, x: Tensor) -> Tensor:
        """What the convolution gives."""
        out: Tensor = _Turned.apply(x, self.weight, self.bias, self.turned, self.padding)  # type: ignore[no-untyped-call]
        return out
