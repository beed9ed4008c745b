"""The values that travel between folders: what a network pass yields, what a loss is made of, what an attack is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat

# Anything that maps a batch of inputs to a batch of logits.
Model = Callable[[Tensor], Tensor]
# Per-sample loss of (logits, target), fixed sign: higher is more adversarial.
SampleLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class View:
    """One network pass: the input of the last linear layer, and what that layer made of it."""

    features: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Views:
    """The passes an objective asked for; a pass it did not ask for is None."""

    clean: View | None
    adv: View | None


@dataclass(frozen=True)
class Parts:
    """A training loss and the named terms it was summed from (the terms carry no gradient weight of their own)."""

    total: Tensor
    terms: dict[str, Tensor]


class Attack(Protocol):
    """A configured attack: a model, inputs and labels in, inputs inside the threat out."""

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """Perturbed copy of x. The caller chose the model's mode; early_stop lets broken samples leave the batch."""

    @property
    def mixed_labels(self) -> bool:
        """Whether y may hold rows of class probabilities."""

    def passes(self, classes: int) -> int:
        """Forward passes of the network it makes per batch, at most."""


class Objective(Protocol):
    """A robust training loss: which passes it needs, what its inner attack climbs, and the loss itself."""

    @property
    def passes(self) -> tuple[str, ...]:
        """Network passes in order, each 'clean' or 'adv'; a repeated one only moves BatchNorm statistics."""

    @property
    def inner_loss(self) -> str:
        """Name of the loss the inner attack climbs, or 'none' for training without attack."""

    @property
    def hard_labels(self) -> bool:
        """Whether the loss needs class indices (and so refuses mixed labels)."""

    def loss(self, views: Views, y: Tensor) -> Parts:
        """The training loss of one batch; y holds class indices, or rows of class probabilities."""
