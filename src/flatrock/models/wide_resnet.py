"""Wide residual networks WRN-depth-width for 32x32 images (Zagoruyko and Komodakis 2016, arXiv:1605.07146)."""

from __future__ import annotations

from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.models.classifier import Classifier
from flatrock.models.layers import PreActBlock, activated, blocks_per_group, conv, global_average, he_fan_out, stages


class WideResNet(Classifier):
    """Three groups of n = (depth - 4)/6 pre-activation blocks, widths 16k, 32k, 64k for width factor k; no dropout."""

    def __init__(self, *, depth: int, width: int, num_classes: int) -> None:
        super().__init__(input_shape=(3, 32, 32), num_classes=num_classes)
        n = blocks_per_group(depth, family="wide_resnet", offset=4)
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ConfigError(f"wide_resnet width must be an integer of at least 1, got {width!r}; 10 is usual")
        self.conv = conv(3, 16, 3)
        self.blocks = stages(PreActBlock, 16, (16 * width, 32 * width, 64 * width), blocks=n)
        self.bn = nn.BatchNorm2d(64 * width)
        self.head = nn.Linear(64 * width, num_classes)
        he_fan_out(self)
        nn.init.zeros_(self.head.bias)

    def embed(self, x: Tensor) -> Tensor:
        """Channel means of the last activated map."""
        return global_average(activated(self.bn, self.blocks(self.conv(x))))
