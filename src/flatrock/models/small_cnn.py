"""Small convolutional networks for grey images: MNIST (1x28x28) and the 8x8 digits."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.models.classifier import Classifier
from flatrock.models.layers import activated, conv, global_average


class MnistCNN(Classifier):
    """The 7-layer network of the TRADES paper: four unpadded 3x3 convolutions, three linear layers; 200 features.

    Convolutions start from He's normal distribution (fan-in), the head at zero: the first step only moves the head.
    Dropout of one half makes attacks in train mode random.
    """

    def __init__(self, *, num_classes: int) -> None:
        super().__init__(input_shape=(1, 28, 28), num_classes=num_classes)
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 32, 3)
        self.conv3 = nn.Conv2d(32, 64, 3)
        self.conv4 = nn.Conv2d(64, 64, 3)
        self.fc1 = nn.Linear(64 * 4 * 4, 200)
        self.dropout = nn.Dropout(0.5)
        self.fc2 = nn.Linear(200, 200)
        self.head = nn.Linear(200, num_classes)
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def embed(self, x: Tensor) -> Tensor:
        """The second hidden linear layer after ReLU."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.max_pool2d(F.relu(self.conv4(F.relu(self.conv3(x)))), 2)
        x = self.dropout(F.relu(self.fc1(x.flatten(1))))
        return F.relu(self.fc2(x))


class LeNet5(Classifier):
    """The MNIST network of Madry et al. (2017): two padded 5x5 convolutions, two linear layers; 1024 features."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__(input_shape=(1, 28, 28), num_classes=num_classes)
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * 7 * 7, 1024)
        self.head = nn.Linear(1024, num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """The hidden linear layer after ReLU."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.relu(self.fc1(x.flatten(1)))


class DigitsCNN(Classifier):
    """Three 3x3 convolutions (16, 32, 64 channels) with BatchNorm for 1x8x8 images; 64 features. Trains in seconds."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__(input_shape=(1, 8, 8), num_classes=num_classes)
        self.conv1 = conv(1, 16, 3)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = conv(16, 32, 3)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = conv(32, 64, 3)
        self.bn3 = nn.BatchNorm2d(64)
        self.head = nn.Linear(64, num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Channel means of the last activated 4x4 map."""
        x = activated(self.bn1, self.conv1(x))
        x = F.max_pool2d(activated(self.bn2, self.conv2(x)), 2)
        return global_average(activated(self.bn3, self.conv3(x)))
