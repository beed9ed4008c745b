"""How long the attacks of an evaluation still take, as far as that can be known while one of them runs."""

from __future__ import annotations

from collections.abc import Sequence

from flatrock.attacks.boundary import FastAdaptiveBoundary, TargetedBoundary
from flatrock.attacks.rays import RayS
from flatrock.attacks.square import Square
from flatrock.attacks.transfer import Transfer
from flatrock.core.progress import clock
from flatrock.core.types import Attack
from flatrock.evaluation.plans import Step
from flatrock.evaluation.tally import Tally


def most_passes(attack: Attack, classes: int) -> int:
    """Passes of one sample through the network, forward and backward, that an attack makes at most."""
    if isinstance(attack, Transfer):
        return most_passes(attack.by, classes)
    forwards = attack.passes(classes)
    if isinstance(attack, Square | RayS):
        return forwards
    if isinstance(attack, FastAdaptiveBoundary):  # a backward pass per rival of a run and step, two forward ones
        rivals = 1 if isinstance(attack, TargetedBoundary) else classes - 1
        return forwards + (forwards - 1) // 2 * rivals
    return 2 * forwards


def outlook(tally: Tally, steps: Sequence[Step], number: int, *, left: int, votes: int = 1, devices: int = 1) -> str:
    """Which attack of how many this is, from 1, how many samples stand, and when all attacks will have ended at most.

    Of a single attack, and of the last one, the end is that of the task, which who listens knows.
    """
    standing = f"{100 * tally.standing:.2f} % stand"
    if len(steps) == 1:
        return standing
    later = steps[number:]
    seconds = seconds_left(tally, steps[number - 1], later, left=left, votes=votes) / devices
    return f"attack {number}/{len(steps)}  {standing}" + (f"  all in at most ~{clock(seconds)}" if later else "")


def seconds_left(tally: Tally, step: Step, later: Sequence[Step], *, left: int, votes: int) -> float:
    """Of a device until the last attack has ended, at most, if a pass takes as long as those of this attack so far.

    t (left / done + sum_later n m / passes): t seconds for `done` samples and `passes` of this attack; of each later
    one n samples, those it would see if none fell any more, and m passes of a sample at most, with the verdict.
    """
    cost = tally.costs[step.label]
    ahead = sum(len(tally.candidates(s)) * (most_passes(s.attack, tally.classes) + votes) for s in later)
    return cost["seconds"] * (left / (cost["samples"] - left) + ahead / (cost["forwards"] + cost["backwards"]))
