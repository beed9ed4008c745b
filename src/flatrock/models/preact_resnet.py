"""PreActResNet-18 for 32x32 images (He et al. 2016, arXiv:1603.05027)."""

from __future__ import annotations

from torch import Tensor, nn

from flatrock.models.classifier import Classifier
from flatrock.models.layers import PreActBlock, activated, conv, global_average, stages


class PreActResNet18(Classifier):
    """Four stages of two pre-activation blocks, widths 64 to 512; 512 features."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__(input_shape=(3, 32, 32), num_classes=num_classes)
        self.conv = conv(3, 64, 3)
        self.blocks = stages(PreActBlock, 64, (64, 128, 256, 512), blocks=2)
        self.bn = nn.BatchNorm2d(512)
        self.head = nn.Linear(512, num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Channel means of the last activated map."""
        return global_average(activated(self.bn, self.blocks(self.conv(x))))
