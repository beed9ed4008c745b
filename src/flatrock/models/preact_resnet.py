"""PreActResNet-18 for 32x32 images (He et al. 2016, arXiv:1603.05027)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from flatrock.models.classifier import Classifier
from flatrock.models.layers import PreActBlock, activated, conv, global_average, norm_maker, stages


class PreActResNet18(Classifier):
    """Four stages of two pre-activation blocks, widths 64 to 512; 512 features. BatchNorm: see `norm_maker`."""

    def __init__(self, *, num_classes: int, bn_momentum: float = 0.1, bn_first: int = 0) -> None:
        super().__init__(input_shape=(3, 32, 32), num_classes=num_classes)
        norm = norm_maker("preact_resnet18", bn_momentum, bn_first)
        self.conv = conv(3, 64, 3)
        self.blocks = stages(partial(PreActBlock, norm=norm), 64, (64, 128, 256, 512), blocks=2)
        self.bn = norm(512)
        self.head = nn.Linear(512, num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Channel means of the last activated map."""
        return global_average(activated(self.bn, self.blocks(self.conv(x))))
