"""A network of one's own as a Classifier: its last linear layer becomes the head, the rest makes the features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatrock.core.borrow import mode
from flatrock.core.errors import ModelError
from flatrock.core.rng import Seed
from flatrock.models.classifier import Classifier
from flatrock.models.compare import near
from flatrock.models.view import last_linear

RANDOM = "answers at random in eval mode; let it draw only while self.training is true"
MORE = "does more with its last nn.Linear than to return what it gives; let it call that layer once, as its last step"


class Adapted(Classifier):
    """head(network(x)): any module of logits that ends in an nn.Linear, which is taken out of it (not of a copy).

    `head_places` are the names it had there.
    """

    def __init__(self, network: nn.Module, *, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        like = next(network.parameters(), torch.zeros(()))
        x = torch.rand(2, *input_shape, generator=Seed(0).child("adapted").generator()).to(like)
        with mode(network, training=False), torch.no_grad():
            self.head, seen = last_linear(network, x)
            if seen.logits.shape[1] != num_classes:
                raise ModelError(
                    f"{type(network).__name__} has {seen.logits.shape[1]} logits for {num_classes} classes"
                )
            self.head_places = [n for n, m in network.named_modules(remove_duplicate=False) if m is self.head]
            self.network = _without(network, self.head)
            logits = self.head(self.network(x))
            if not near(logits, seen.logits):
                random = not near(self.head(self.network(x)), logits)
                raise ModelError(f"{type(network).__name__} {RANDOM if random else MORE}")

    def embed(self, x: Tensor) -> Tensor:
        """What the head takes."""
        features: Tensor = self.network(x)
        return features


def _without(network: nn.Module, layer: nn.Module) -> nn.Module:
    """The network with this layer passed by, wherever it holds it."""
    if network is layer:
        return nn.Identity()
    for parent in list(network.modules()):
        for name, child in list(parent._modules.items()):  # each of its names: named_children tells one
            if child is layer:
                setattr(parent, name, nn.Identity())
    return network
