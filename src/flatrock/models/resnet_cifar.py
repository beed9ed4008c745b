"""Post-activation residual networks for 32x32 images (He et al. 2015, arXiv:1512.03385)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from flatrock.models.classifier import Classifier
from flatrock.models.layers import (
    PostActBlock,
    activated,
    blocks_per_group,
    conv,
    global_average,
    he_fan_out,
    norm_maker,
    stages,
)


class ResNet18(Classifier):
    """ResNet-18 with a 3x3 stem: four stages of two blocks, widths 64 to 512; 512 features.

    BatchNorm: see `norm_maker`.
    """

    def __init__(self, *, num_classes: int, bn_momentum: float = 0.1, bn_first: int = 0) -> None:
        super().__init__(input_shape=(3, 32, 32), num_classes=num_classes)
        norm = norm_maker("resnet18", bn_momentum, bn_first)
        self.conv = conv(3, 64, 3)
        self.bn = norm(64)
        self.blocks = stages(partial(PostActBlock, norm=norm), 64, (64, 128, 256, 512), blocks=2)
        self.head = nn.Linear(512, num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Channel means of the last map."""
        return global_average(self.blocks(activated(self.bn, self.conv(x))))


class CifarResNet(Classifier):
    """The thin ResNet of depth 6n + 2: three groups of n blocks, widths 16, 32, 64; 64 features.

    BatchNorm: see `norm_maker`.
    """

    def __init__(self, *, depth: int, num_classes: int, bn_momentum: float = 0.1, bn_first: int = 0) -> None:
        super().__init__(input_shape=(3, 32, 32), num_classes=num_classes)
        n = blocks_per_group(depth, family="resnet_cifar", offset=2)
        norm = norm_maker("resnet_cifar", bn_momentum, bn_first)
        self.conv = conv(3, 16, 3)
        self.bn = norm(16)
        self.blocks = stages(partial(PostActBlock, norm=norm), 16, (16, 32, 64), blocks=n)
        self.head = nn.Linear(64, num_classes)
        he_fan_out(self)

    def embed(self, x: Tensor) -> Tensor:
        """Channel means of the last map."""
        return global_average(self.blocks(activated(self.bn, self.conv(x))))
