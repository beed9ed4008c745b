"""Attacks of the user's: what one must be, and a function as one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

from torch import Tensor, nn

from flatrock.core.errors import ModelError, ThreatError, in_words, is_plain, shown
from flatrock.core.guests import of_flatrock, origin, raised_at
from flatrock.core.held import held_digest
from flatrock.core.numbers import plain
from flatrock.core.own import Own
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Threat
from flatrock.core.types import Attack

_AFTERWARDS = "load it again, and let the attack work on copy.deepcopy(model)"
# What a function is called with, and what it is told if it asks.
ASKED, GIVEN = "model, x, y, threat, gen", ("early_stop",)


@dataclass(frozen=True, repr=False)
class Written:
    """A function as an attack: function(model, x, y, threat, gen, **options), which is held to ball and box.

    Where it has an argument `early_stop` it is told whether broken samples may leave. Its passes are not known: a cost
    is estimated as if it made one, or as many as its option `steps`.
    """

    function: Callable[..., Tensor]
    options: Mapping[str, Any]
    mixed_labels: ClassVar[bool] = False
    bounded: ClassVar[bool] = True

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
    ) -> Tensor:
        """What the function returns."""
        heeds = "early_stop" in inspect.signature(self.function).parameters
        return self.function(model, x, y, threat, gen, **self.options, **({"early_stop": early_stop} if heeds else {}))

    @property
    def settings(self) -> dict[str, Any]:
        """Every option, those left at their defaults included."""
        takes = list(inspect.signature(self.function).parameters.values())[len(ASKED.split(",")) :]
        left = {p.name: p.default for p in takes if p.default is not p.empty and p.name not in GIVEN}
        return {**left, **self.options}

    def passes(self, classes: int) -> int:
        """Forward passes, as far as `steps` tells."""
        steps = self.settings.get("steps")
        return steps if isinstance(steps, int) and steps >= 0 else 1

    def __repr__(self) -> str:
        said = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{called(self.function)}({said})"


def _pass_faults(attack: Attack) -> list[str]:
    """Why costs cannot be told from `passes`."""
    try:
        passes: object = attack.passes(2)
    except Exception as error:  # it is the user's code: anything can happen
        return [f"its passes(2) raised {in_words(error)}{raised_at(error, attack)}"]
    fine = isinstance(passes, Integral) and not isinstance(passes, bool) and int(passes) >= 0
    return [] if fine else [f"its passes(2) gave {shown(passes)}, and not how many, a whole number of at least 0"]


OWN = Own[Attack](
    "an attack",
    "`def climb(model, x, y, threat, gen, *, steps: int = 10) -> Tensor`, or a class with `mixed_labels = False`, "
    "`bounded = True`, `def passes(self, classes)` and "
    "`def __call__(self, model, x, y, threat, gen, *, early_stop=False)`",
    calls={"__call__": "model, x, y, threat, gen, *, early_stop", "passes": "classes"},
    attributes=("mixed_labels", "bounded"),
    may={"at": "moment"},
    returns=Tensor,
    given=GIVEN,
    asked=ASKED,
    wrapped=Written,
    check=_pass_faults,
)


def called(thing: object) -> str:
    """The name of a class or function, or of the class of an object."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def is_ours(attack: Attack) -> bool:
    """Whether an attack, or the one behind a transfer, came with flatrock."""
    behind = getattr(attack, "by", attack)
    return of_flatrock(behind) and not isinstance(behind, Written)


def described(attack: Attack) -> dict[str, Any]:
    """The kind and the options of an attack of the user's, as far as a file can hold them, and where its code lies.

    Of the rest, tensors and what else is no plain value, what a function closes over, code without a file, a digest.
    """
    thing: object
    if isinstance(attack, Written):
        thing, options = attack.function, attack.settings
        kind, code = called(attack.function), origin(attack.function)
    else:
        names: list[str] = [f.name for f in dataclasses.fields(attack)] if dataclasses.is_dataclass(attack) else []
        told = {name: getattr(attack, name) for name in names} or getattr(attack, "__dict__", {})
        thing, options = type(attack), dict(told)
        kind, code = called(type(attack)), origin(attack)
    holds = held_digest(thing, options)
    return {
        "kind": kind,
        **{k: plain(v) for k, v in options.items() if is_plain(v)},
        **({"code": code} if code else {}),
        **({"holds": holds} if holds else {}),
    }


def tried(
    attack: Attack, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen, *, early_stop: bool = False
) -> Tensor:
    """What an attack returns; one of the user's gives a tensor like x, and leaves the weights.

    What it writes into those through `.data` is not seen here; an evaluation sees that.
    """
    if is_ours(attack):
        return attack(model, x, y, threat, gen, early_stop=early_stop).detach()
    with watched(attack, model):
        x_adv: object = attack(model, handed(attack, x), handed(attack, y), threat, gen, early_stop=early_stop)
    if not isinstance(x_adv, Tensor) or x_adv.dtype != x.dtype:
        found = x_adv.dtype if isinstance(x_adv, Tensor) else type(x_adv).__name__
        raise ThreatError(
            f"{attack!r} returned {found}, not inputs like those it got ({x.dtype}); return a changed copy"
        )
    return x_adv.detach()


def handed(attack: Attack, given: Tensor) -> Tensor:
    """Inputs or labels as an attack gets them: one of the user's a copy, as it is measured by what it may write into.

    Ours write into nothing, and pay for no copies.
    """
    return given if is_ours(attack) else given.clone()


@contextmanager
def watched(attack: Attack, model: nn.Module) -> Iterator[None]:
    """An attack of the user's at work inside leaves the weights; ModelError if not."""
    if is_ours(attack):
        yield
        return
    weights = _versions(model)
    yield
    if _versions(model) != weights:
        raise changed_weights(repr(attack))


def _versions(model: nn.Module) -> list[int]:
    """How often each weight was written to; whoever lends the network gives buffers and modes back."""
    return [p._version for p in model.parameters() if not p.is_inference()]


def changed_weights(attack: str) -> ModelError:
    """What is said of an attack that does not leave the model as it is."""
    return ModelError(f"attack {attack} changed the weights of the model, and they stay changed: {_AFTERWARDS}")


def changed_answers(attack: str) -> ModelError:
    """The same, where it is not the weights."""
    return ModelError(
        f"attack {attack} changed the model, which no longer answers as before (look for a hook, an attribute or a "
        f"layer that the attack leaves behind), and it stays changed: {_AFTERWARDS}"
    )
