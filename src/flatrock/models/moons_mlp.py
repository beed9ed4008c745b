"""The dense network for points in the plane on which curvature can be computed exactly."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from flatrock.models.classifier import Classifier


class MoonsMLP(Classifier):
    """2 - 100 - 100 - num_classes with ReLU; 10,602 parameters for two classes."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__(input_shape=(2,), num_classes=num_classes)
        self.fc1 = nn.Linear(2, 100)
        self.fc2 = nn.Linear(100, 100)
        self.head = nn.Linear(100, num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """The second hidden layer after ReLU."""
        return F.relu(self.fc2(F.relu(self.fc1(x))))
