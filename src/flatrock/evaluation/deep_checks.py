"""Doubts that need attacks of their own: does a longer one find more, does its loss rise, does a huge budget win?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate

from flatrock.core.records import Finding
from flatrock.core.threat import Threat

# How much a longer attack may still break: this share of the samples looked at, and at least so many.
STEPS_GAIN, LEAST = 0.03, 3
# How far the loss may fall with more steps, relative to its whole rise, and the least rise that says anything.
LOSS_DROP, LEAST_RISE = 0.1, 1e-3
# Share that may survive a budget of half the box.
SURVIVES_ANYTHING = 0.05


def check_steps(
    gains: Mapping[str, int], samples: int, *, random: bool = False, votes: int = 1, planned: bool = False
) -> list[Finding]:
    """E08: a longer PGD breaks samples that survived every attack named, even those of `autoattack` if it was planned;
    told of the one that breaks most."""
    what, count = max(gains.items(), key=lambda item: item[1])
    if count <= max(STEPS_GAIN * samples, LEAST):
        return []
    cure = "the attacks named are too weak here; use more steps and restarts, or the plan autoattack"
    if planned:
        cure = (
            "where plain PGD finds more than autoattack, gradients mislead and the true number is lower still; look "
            "for quantisation, saturation or fast waves in the model, and name pgd-100 beside the plan"
        )
    if random and votes == 1:
        cure = (
            "a model that answers at random (E05) loses some to every further look, by chance alone; judge with "
            "--votes 15 before calling the attacks weak"
        )
    elif random:
        cure = "the attacks named are too weak here; use more steps and restarts, with means over draws (eot=20)"
    return [Finding("E08", f"PGD with {what} breaks another {100 * count / samples:.1f} % of {samples} samples", cure)]


def check_climb(losses: Mapping[int, float], *, random: bool = False) -> list[Finding]:
    """E09: more steps up the loss end lower than fewer did; a loss that is not finite is another finding's matter."""
    values = list(losses.values())
    if not all(math.isfinite(v) for v in values):
        return []
    rise = max(values) - min(values)
    fall = max(highest - value for highest, value in zip(accumulate(values, max), values, strict=True))
    if rise <= LEAST_RISE * max(values) or fall <= LOSS_DROP * rise:
        return []
    told = ", ".join(f"{steps}: {value:.3g}" for steps, value in losses.items())
    cure = "the loss surface is rough or its gradients wrong; trust square and transfer more than gradient attacks"
    if random:
        cure = "draws of a model that answers at random (E05) may be why; climb means over them, as pgd-20:eot=20 does"
    return [Finding("E09", f"the loss does not rise with the steps of PGD ({told})", cure)]


def check_budget(missed: float, threat: Threat, samples: int, *, random: bool = False) -> list[Finding]:
    """E10: samples survive a huge budget although wrong answers within it are known."""
    if missed <= SURVIVES_ANYTHING:
        return []
    cure = "an attack that follows gradients must find it; they are masked"
    if random:
        cure = (
            "this PGD climbs single draws of a model that answers at random (E05), which can be all that stops it; try "
            "pgd-50:eot=20 with this eps, and if it does not win either, gradients are masked"
        )
    return [
        Finding(
            "E10",
            f"{100 * missed:.0f} % of {samples} samples survive PGD with {threat.norm} eps {threat.eps:.3g}, "
            "although a wrong answer is in reach: plain grey, another sample moved there, or what an attack found",
            cure,
        )
    ]
