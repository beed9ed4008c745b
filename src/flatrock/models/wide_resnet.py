"""Wide residual networks WRN-depth-width for 32x32 images (Zagoruyko and Komodakis 2016, arXiv:1605.07146)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.core.options import choose
from flatrock.models.classifier import Classifier
from flatrock.models.layers import (
    ACTIVATIONS,
    PreActBlock,
    activated,
    blocks_per_group,
    conv,
    global_average,
    he_fan_out,
    norm_maker,
    stages,
)


class WideResNet(Classifier):
    """Three groups of n = (depth - 4)/6 pre-activation blocks, widths 16k, 32k, 64k for width factor k; no dropout.

    `activation: silu` (also called swish) is what networks trained on generated images have. BatchNorm: `norm_maker`.
    """

    def __init__(
        self,
        *,
        depth: int,
        width: int,
        num_classes: int,
        activation: str = "relu",
        bn_momentum: float = 0.1,
        bn_first: int = 0,
    ) -> None:
        super().__init__(input_shape=(3, 32, 32), num_classes=num_classes)
        n = blocks_per_group(depth, family="wide_resnet", offset=4)
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ConfigError(f"wide_resnet width must be an integer of at least 1, got {width!r}; 10 is usual")
        choose("wide_resnet", "activation", activation, ACTIVATIONS)
        norm = norm_maker("wide_resnet", bn_momentum, bn_first)
        self.activation = activation
        self.conv = conv(3, 16, 3)
        block = partial(PreActBlock, norm=norm, activation=activation)
        self.blocks = stages(block, 16, (16 * width, 32 * width, 64 * width), blocks=n)
        self.bn = norm(64 * width)
        self.head = nn.Linear(64 * width, num_classes)
        he_fan_out(self)
        nn.init.zeros_(self.head.bias)

    def embed(self, x: Tensor) -> Tensor:
        """Channel means of the last activated map."""
        return global_average(activated(self.bn, self.blocks(self.conv(x)), self.activation))
