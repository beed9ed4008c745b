"""The objectives by name."""

from __future__ import annotations

from collections.abc import Iterator

from flatrock.core.own import Own
from flatrock.core.registry import Registry, unknown
from flatrock.core.types import Objective
from flatrock.objectives.alp import ALP
from flatrock.objectives.at import AT
from flatrock.objectives.gat import GAT
from flatrock.objectives.hat import HAT
from flatrock.objectives.mart import MART
from flatrock.objectives.standard import Standard
from flatrock.objectives.trades import TRADES

# What an inner attack can climb, and 'none' for training without attack.
INNER_LOSSES = ("ce", "kl", "guided", "none")


def _faults(made: Objective) -> Iterator[str]:
    """What is wrong with the passes and the attack that an objective of the user's asks for."""
    passes = made.passes
    known = ("clean", "adv", "helper") if isinstance(made, HAT) else ("clean", "adv")
    if not isinstance(passes, tuple) or not passes or any(p not in known for p in passes):
        yield f"its passes are {passes!r}, and not a tuple of {' and '.join(map(repr, known))}"
    elif made.inner_loss not in INNER_LOSSES:
        yield unknown("inner_loss", made.inner_loss, INNER_LOSSES)
    elif made.inner_loss == "none" and "adv" in passes:
        yield "it makes an 'adv' pass, but its inner_loss is 'none': there is no attack"


OWN = Own[Objective](
    "an objective",
    "a class with `passes = ('clean', 'adv')`, `inner_loss = 'kl'`, `hard_labels = False` and "
    "`def loss(self, views, y)`",
    calls={"loss": "views, y"},
    may={"at": "moment"},
    attributes=("passes", "inner_loss", "hard_labels"),
    check=_faults,
)
OBJECTIVES: Registry[Objective] = Registry("objective", OWN)
OBJECTIVES.add("standard", Standard, "cross-entropy on clean inputs, no attack")
OBJECTIVES.add("at", AT, "cross-entropy on adversarial inputs", cite="Madry 2018")
OBJECTIVES.add("trades", TRADES, "clean cross-entropy plus beta times KL(clean || adversarial)", cite="Zhang 2019")
OBJECTIVES.add(
    "hat", HAT, "trades (or at) plus gamma times cross-entropy beyond x' with a helper's labels", cite="Rade 2022"
)
OBJECTIVES.add("gat", GAT, "clean cross-entropy plus squared distance of the two answers", cite="Sriramanan 2020")
OBJECTIVES.add("mart", MART, "boosted adversarial cross-entropy plus misclassification-weighted KL", cite="Wang 2020")
OBJECTIVES.add("alp", ALP, "adversarial cross-entropy plus squared distance of the logit pair", cite="Kannan 2018")
