"""The values that travel between folders: what a network pass yields, what a loss is made of, what an attack is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat

# Anything that maps a batch of inputs to a batch of logits.
Model = Callable[[Tensor], Tensor]
# Per-sample loss of (logits, target), fixed sign: higher is more adversarial.
SampleLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class View:
    """One network pass: the input of the last linear layer, what that layer made of it; in a loss, also its inputs."""

    features: Tensor
    logits: Tensor
    x: Tensor | None = None


@dataclass(frozen=True)
class Views:
    """The passes an objective asked for, a pass it did not ask for is None; and the labels of the helper's.

    `ids` say which samples of the training set these are.
    """

    clean: View | None
    adv: View | None
    helper: View | None = None
    helper_y: Tensor | None = None
    ids: Tensor | None = None


# Terms of a loss that look at labels: a method that puts soft labels beside them takes their weight from these.
LABEL_TERMS = ("ce", "ce_adv", "boost")


@dataclass(frozen=True)
class Parts:
    """A training loss as named terms, batch means without their weights: total = sum_k weights[k] * terms[k].

    The names are one vocabulary: `ce` and `ce_adv` (cross-entropy on clean and adversarial inputs), `boost` (MART's
    margin), `kl` and `wkl` (KL(s || t), weighted by 1 - s_y), `pair_logits` and `pair_probabilities` (ALP;
    GAT has the latter), `ce_helper` (HAT's cross-entropy with the labels of its helper).
    """

    terms: Mapping[str, Tensor]
    weights: Mapping[str, float]

    @cached_property
    def total(self) -> Tensor:
        """The weighted sum; a term of weight 0 is left out, so that it costs and spoils nothing."""
        summed: Tensor | None = None
        for name, term in self.terms.items():
            weight = self.weights[name]
            if weight != 0:
                share = term if weight == 1 else weight * term
                summed = share if summed is None else summed + share
        # Weights that are all zero still make a loss that can be differentiated.
        return next(iter(self.terms.values())) * 0 if summed is None else summed


class Replayer:
    """Base of networks that can run work of many passes, a pure function of tensors, at once."""

    def whole(self, name: Hashable, work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """What `work` makes of the tensors, row by row; whatever else it depends on is in `name`."""
        raise NotImplementedError


class Attack(Protocol):
    """A configured attack: a model, inputs and labels in, inputs inside the threat out."""

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """Perturbed copy of x. The caller chose the model's mode; early_stop lets broken samples leave the batch."""

    @property
    def mixed_labels(self) -> bool:
        """Whether y may hold rows of class probabilities."""

    @property
    def bounded(self) -> bool:
        """Whether what it returns lies in the ball; only such an attack may be evaluated with."""

    def passes(self, classes: int) -> int:
        """Forward passes of the network it makes per batch, at most."""


@dataclass(frozen=True)
class Help:
    """Inputs beyond the adversarial ones, and the classes another network, the helper, gives the latter (HAT)."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Point:
    """Adversarial inputs of one batch, the weight their loss has in training, and what a helper says to them.

    `noise` is added to every input of the network in this loss, the clean ones too.
    """

    x_adv: Tensor
    weight: float = 1.0
    help: Help | None = None
    noise: Tensor | None = None


@runtime_checkable
class PathAttack(Attack, Protocol):
    """An attack whose intermediate inputs are trained on too (ATENT)."""

    def path(self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen) -> tuple[Point, ...]:
        """Every input on the way whose loss counts, the last one last."""

    @property
    def points(self) -> int:
        """How many inputs `path` returns."""


@runtime_checkable
class NoisyAttack(Attack, Protocol):
    """An attack on x' + noise, whose loss in training is computed under the same noise, on clean inputs as well."""

    def input_noise(self, x: Tensor, gen: SampleGen) -> Tensor | None:
        """The noise of these samples, the same whenever it is asked for; None: there is none."""


class Objective(Protocol):
    """A robust training loss: which passes it needs, what its inner attack climbs, and the loss itself."""

    @property
    def passes(self) -> tuple[str, ...]:
        """Passes in order, each 'clean', 'adv' or 'helper'; a repeated one only moves BatchNorm statistics."""

    @property
    def inner_loss(self) -> str:
        """Name of the loss the inner attack climbs, or 'none' for training without attack."""

    @property
    def hard_labels(self) -> bool:
        """Whether the loss needs class indices (and so refuses mixed labels)."""

    def loss(self, views: Views, y: Tensor) -> Parts:
        """The training loss of one batch; y holds class indices, or rows of class probabilities."""
