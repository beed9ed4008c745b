"""The adversarial inputs of a training batch."""

from __future__ import annotations

from dataclasses import replace

from flatrock.attacks.craft import check_crafted
from flatrock.attacks.written import tried
from flatrock.core.hooks import Shift
from flatrock.core.rng import SampleGen
from flatrock.core.types import NoisyAttack, PathAttack, Point
from flatrock.engine.loss import Stage


def craft(stage: Stage, shift: Shift) -> tuple[Point, ...]:
    """Attack w + shift in the BatchNorm mode the recipe names, and ask the helper, if there is one, about the result.

    Whatever loss is computed at these points takes the helper's word, and the noise of the attack, from them. The clean
    batch itself without attack.
    """
    points, helper = _noisy(stage, _attacked(stage, shift)), stage.job.helper
    return points if helper is None else tuple(replace(p, help=helper(stage.x, p.x_adv)) for p in points)


def _attacked(stage: Stage, shift: Shift) -> tuple[Point, ...]:
    job, attack = stage.job, stage.attack
    if attack is None:
        return (Point(stage.x),)
    gen = _gen(stage)
    with job.runner.attacked(job.bn_mode, shift) as model:
        if isinstance(attack, PathAttack):
            path = attack.path(model, stage.x, stage.y, job.threat, gen)
            return tuple(Point(p.x_adv.detach(), p.weight) for p in path)
        return (Point(tried(attack, model, stage.x, stage.y, job.threat, gen)),)


def _gen(stage: Stage) -> SampleGen:
    """The random numbers of an attack in this step."""
    return stage.job.seed.child("attack", stage.moment.step).samples(stage.ids)


def _noisy(stage: Stage, points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The points with the noise the attack has had on its inputs; drawn anew, as it belongs to samples."""
    attack = stage.attack
    noise = attack.input_noise(stage.x, _gen(stage)) if isinstance(attack, NoisyAttack) else None
    return points if noise is None else tuple(replace(p, noise=noise) for p in points)


def check(stage: Stage, points: tuple[Point, ...]) -> None:
    """Verify ball and box of what the attack returned (its last word); it costs a wait for a GPU."""
    attack = stage.attack
    if attack is not None and attack.bounded:
        check_crafted(points[-1].x_adv, stage.x, stage.job.threat, attack)


def merged(first: Shift, second: Shift) -> Shift:
    """Both shifts at once."""
    if not first or not second:
        return first or second
    both = {name: first[name] + second[name] for name in first.keys() & second.keys()}
    return {**first, **second, **both}
