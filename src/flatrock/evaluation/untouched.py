"""Whether an attack of the user's leaves the networks of an evaluation as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from flatrock.attacks.written import changed_answers, changed_weights
from flatrock.core.rounding import gap
from flatrock.core.tensorfile import tensors_digest
from flatrock.evaluation.fast_model import Counted

# What a network answers, with random numbers that change with the purpose.
Ask = Callable[[Counted, str], Tensor]
PURPOSE = "intact"


class Untouched:
    """Networks as they are before the first attack of the user's: their weights, and what they answer.

    Weights tell of a change that no answer shows yet, answers of what is in no weight: a hook, an attribute, a layer
    put in the place of another. Who answers at random is not asked: no answers of it tell (nobody is without `ask`).
    """

    def __init__(self, networks: Sequence[Counted], ask: Ask | None) -> None:
        self._networks = networks
        self._weights = self._digest()
        self._asked = [] if ask is None else [(ask, n, a) for n in networks if (a := _steady(ask, n)) is not None]

    def check(self, attack: str) -> None:
        """ModelError if they are no longer so."""
        if self._digest() != self._weights:
            raise changed_weights(attack)
        for ask, network, before in self._asked:
            if gap(before, ask(network, PURPOSE)) != 0:
                raise changed_answers(attack)

    def _digest(self) -> str:
        """Of the weights; what a model keeps in buffers is its own affair."""
        return tensors_digest({f"{i} {k}": p for i, n in enumerate(self._networks) for k, p in n.named_parameters()})


def _steady(ask: Ask, network: Counted) -> Tensor | None:
    """The answer, if another draw does not change it."""
    answer = ask(network, PURPOSE)
    return answer if gap(answer, ask(network, f"{PURPOSE} again")) == 0 else None
