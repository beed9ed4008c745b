"""VGG with BatchNorm and a single linear layer, for 32x32 images (Simonyan and Zisserman 2014, arXiv:1409.1556)."""

from __future__ import annotations

from torch import Tensor, nn

from flatrock.core.errors import ConfigError
from flatrock.models.classifier import Classifier

# Width and number of 3x3 convolutions of each stage, by depth; a 2x2 max-pool ends every stage.
_STAGES = {
    16: ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)),
    19: ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)),
}


class VGG(Classifier):
    """Five stages of conv(+bias)-BatchNorm-ReLU, each halving the size down to 1x1; 512 features."""

    def __init__(self, *, depth: int, num_classes: int) -> None:
        super().__init__(input_shape=(3, 32, 32), num_classes=num_classes)
        if depth not in _STAGES:
            raise ConfigError(f"vgg depth must be one of {', '.join(map(str, _STAGES))}, got {depth!r}")
        made: list[nn.Module] = []
        inner = 3
        for width, count in _STAGES[depth]:
            for _ in range(count):
                made += [nn.Conv2d(inner, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                inner = width
            made.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*made)
        self.head = nn.Linear(512, num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """The 1x1 map after the last pool."""
        out: Tensor = self.layers(x)
        return out.flatten(1)
