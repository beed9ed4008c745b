"""The flatness methods by name."""

from __future__ import annotations

from collections.abc import Iterator

from flatrock.core.hooks import Flatness
from flatrock.core.own import Own
from flatrock.core.registry import Registry
from flatrock.flatness.awp import AWP
from flatrock.flatness.rat import RAT
from flatrock.flatness.s2o import S2O
from flatrock.flatness.sam import SAM
from flatrock.flatness.swa import SWA
from flatrock.flatness.trh import TrH

HOOKS = {
    "before_attack": "model, moment",
    "before_loss": "scene",
    "in_loss": "look",
    "after_step": "model, moment",
}
OTHERS = {
    "average": "",
    "state": "",
    "restore": "tensors",
    "check": "model",
    "check_objective": "objective",
    "passes": "objective, attack",
}


def _faults(made: Flatness) -> Iterator[str]:
    """What would make a method of the user's do nothing, or get into the way of others, unnoticed."""
    kind = type(made)
    if all(getattr(kind, hook) is getattr(Flatness, hook) for hook in HOOKS):
        yield f"it overrides none of the hooks {', '.join(HOOKS)}, so it would do nothing"
    if kind.before_loss is not Flatness.before_loss and not made.moves_weights:
        yield "it overrides before_loss, so it must say `moves_weights = True`"
    if made.averages and kind.average is Flatness.average:
        yield "it says `averages = True`, so it must override average"
    if not set(made.needs) <= {"clean", "adv"}:
        yield f"its needs are {made.needs!r}, and not a tuple of 'clean' and 'adv'"


OWN = Own[Flatness](
    "a flatness method",
    "a class that derives from flatrock.core.hooks.Flatness and overrides its hooks",
    calls=HOOKS | OTHERS,
    base=Flatness,
    check=_faults,
)
FLATNESS: Registry[Flatness] = Registry("flatness method", OWN)
FLATNESS.add("awp", AWP, "the loss at the worst weights nearby, layer by layer", cite="Wu 2020")
FLATNESS.add("rat", RAT, "weight noise in the attack, Taylor terms of it in the loss", cite="Jin 2023")
FLATNESS.add("trh", TrH, "trace of the loss Hessian as a penalty, in closed form for the top layer", cite="Wang 2023")
FLATNESS.add("s2o", S2O, "soft labels from second-order statistics of the logits", cite="Jin 2022")
FLATNESS.add("swa", SWA, "averaged weights beside the raw ones", cite="Izmailov 2018")
FLATNESS.add("sam", SAM, "the loss at the worst weights in one ball around all of them", cite="Foret 2021")
