"""MobileNetV2 for 32x32 images (Sandler et al. 2018, arXiv:1801.04381): fewer strides than the ImageNet form."""

from __future__ import annotations

from torch import Tensor, nn

from flatrock.models.classifier import Classifier
from flatrock.models.layers import activated, conv, global_average

# Expansion, output width, number of blocks and first stride of each stage: 17 blocks.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """Expand by 1x1, filter each channel by 3x3, project by 1x1 without activation.

    At stride 1 a shortcut is added: x, or a 1x1 convolution with BatchNorm where the width changes.
    """

    def __init__(self, inner: int, outer: int, *, expansion: int, stride: int) -> None:
        super().__init__()
        middle = expansion * inner
        self.conv1 = conv(inner, middle, 1)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = conv(middle, middle, 3, stride=stride, groups=middle)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = conv(middle, outer, 1)
        self.bn3 = nn.BatchNorm2d(outer)
        self.shortcut: nn.Module | None = None
        if stride == 1 and inner != outer:
            self.shortcut = nn.Sequential(conv(inner, outer, 1), nn.BatchNorm2d(outer))
        elif stride == 1:
            self.shortcut = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The block applied to a feature map."""
        out: Tensor = activated(self.bn1, self.conv1(x))
        out = activated(self.bn2, self.conv2(out))
        out = self.bn3(self.conv3(out))
        return out if self.shortcut is None else out + self.shortcut(x)


class MobileNetV2(Classifier):
    """Stem of 32 channels, 17 inverted residual blocks, 1x1 convolution to 1280 features; ReLU throughout."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__(input_shape=(3, 32, 32), num_classes=num_classes)
        self.conv1 = conv(3, 32, 3)
        self.bn1 = nn.BatchNorm2d(32)
        made: list[nn.Module] = []
        inner = 32
        for expansion, width, count, stride in _STAGES:
            for i in range(count):
                made.append(InvertedResidual(inner, width, expansion=expansion, stride=stride if i == 0 else 1))
                inner = width
        self.blocks = nn.Sequential(*made)
        self.conv2 = conv(320, 1280, 1)
        self.bn2 = nn.BatchNorm2d(1280)
        self.head = nn.Linear(1280, num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Channel means of the last activated map."""
        out = self.blocks(activated(self.bn1, self.conv1(x)))
        return global_average(activated(self.bn2, self.conv2(out)))
