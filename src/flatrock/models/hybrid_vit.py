"""Hybrid transformers (arXiv:2010.11929): tokens are the places of the feature map of a ResNet-50 that ends early."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.core.errors import ConfigError
from flatrock.models.vit import PatchEmbed, Transformer, check_sizes, image_shape

GROUPS = 32
# Those of the published network, of GroupNorm and of standardised weights.
NORM_EPS, WEIGHT_EPS = 1e-6, 1e-5
# Blocks and inner width of each stage; blocks are four times as wide outside. The fourth stage of a ResNet-50 is left
# out and its three blocks stand in the third, which keeps the map at a sixteenth of the image.
_STAGES = ((3, 64), (4, 128), (9, 256))
_EXPANSION, _REDUCTION = 4, 16


def padded(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Zeros around a map whose size the stride divides, so that size / stride outputs come out.

    As in the published code an odd number of them puts the larger half at the end: it decides which pixels are read.
    """
    total = max(kernel - stride, 0)
    sides = (total // 2, total - total // 2)
    return F.pad(x, (*sides, *sides)) if total else x


class StdConv(nn.Conv2d):
    """Convolution without bias by standardised filters, (w - mean(w)) / (std(w) + eps), each for itself."""

    def __init__(self, inner: int, outer: int, kernel: int, *, stride: int = 1) -> None:
        super().__init__(inner, outer, kernel, stride=stride, bias=False)
        self.eps = WEIGHT_EPS

    def forward(self, x: Tensor) -> Tensor:
        """The map at 1 / stride of its size."""
        std, mean = torch.std_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) / (std + self.eps)
        return F.conv2d(padded(x, self.kernel_size[0], self.stride[0]), weight, stride=self.stride)


def group_norm(width: int) -> nn.GroupNorm:
    """GroupNorm of 32 groups."""
    return nn.GroupNorm(GROUPS, width, eps=NORM_EPS)


class Shortcut(nn.Module):
    """A 1x1 convolution with GroupNorm."""

    def __init__(self, inner: int, outer: int, *, stride: int) -> None:
        super().__init__()
        self.conv = StdConv(inner, outer, 1, stride=stride)
        self.norm = group_norm(outer)

    def forward(self, x: Tensor) -> Tensor:
        """x with the size and width of the block's output."""
        out: Tensor = self.norm(self.conv(x))
        return out


class Bottleneck(nn.Module):
    """relu(n3(conv3(relu(n2(conv2(relu(n1(conv1(x)))))))) + shortcut): 1x1, 3x3, 1x1 convolutions with GroupNorm.

    The shortcut is x, or a convolution of it where the size or width changes. Blocks begin as their shortcuts: the last
    GroupNorm starts at zero.
    """

    def __init__(self, inner: int, middle: int, *, stride: int) -> None:
        super().__init__()
        outer = _EXPANSION * middle
        changes = stride != 1 or inner != outer
        self.downsample = Shortcut(inner, outer, stride=stride) if changes else nn.Identity()
        self.conv1 = StdConv(inner, middle, 1)
        self.norm1 = group_norm(middle)
        self.conv2 = StdConv(middle, middle, 3, stride=stride)
        self.norm2 = group_norm(middle)
        self.conv3 = StdConv(middle, outer, 1)
        self.norm3 = group_norm(outer)
        nn.init.zeros_(self.norm3.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The block applied to a feature map."""
        out = F.relu(self.norm1(self.conv1(x)))
        out = F.relu(self.norm2(self.conv2(out)))
        return F.relu(self.norm3(self.conv3(out)) + self.downsample(x))


class Stem(nn.Module):
    """7x7 convolution and 3x3 max-pool, both at stride 2, then the stages; 1024 channels at 1/16 of the size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = StdConv(channels, 64, 7, stride=2)
        self.norm = group_norm(64)
        made: list[nn.Module] = []
        inner = 64
        for i, (blocks, middle) in enumerate(_STAGES):
            for j in range(blocks):
                made.append(Bottleneck(inner, middle, stride=2 if i > 0 and j == 0 else 1))
                inner = _EXPANSION * middle
        self.blocks = nn.Sequential(*made)
        self.width = inner

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, h, w] to [n, 1024, h / 16, w / 16]."""
        out = F.relu(self.norm(self.conv(x)))
        # No entry is below 0 here, so that the zeros around it are never the largest.
        made: Tensor = self.blocks(F.max_pool2d(padded(out, 3, 2), 3, 2))
        return made


class HybridEmbed(PatchEmbed):
    """One token per place of the stem's map, by a 1x1 convolution."""

    def __init__(self, channels: int, width: int) -> None:
        stem = Stem(channels)
        super().__init__(stem.width, width, patch=1, stride=1)
        self.backbone = stem

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, h, w] to [n, t, width]."""
        return super().forward(self.backbone(x))


class HybridTransformer(Transformer):
    """A transformer on the map of a ResNet-50 stem with GroupNorm; `mlp` is 4 width if left out."""

    def __init__(
        self,
        *,
        depth: int,
        width: int,
        heads: int,
        mlp: int | None = None,
        input_shape: Sequence[int] = (3, 224, 224),
        num_classes: int,
    ) -> None:
        mlp = 4 * width if mlp is None else mlp
        shape = image_shape("hybrid", input_shape)
        check_sizes("hybrid", depth=depth, width=width, heads=heads, mlp=mlp)
        if shape[1] % _REDUCTION or shape[2] % _REDUCTION:
            raise ConfigError(f"hybrid images need sides that {_REDUCTION} divides, got {shape[1]} x {shape[2]} pixels")
        super().__init__(
            HybridEmbed(shape[0], width),
            grid=(shape[1] // _REDUCTION, shape[2] // _REDUCTION),
            depth=depth,
            width=width,
            heads=heads,
            mlp=mlp,
            input_shape=shape,
            num_classes=num_classes,
        )
