"""The adversarial inputs of a training batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from flatrock.attacks.craft import check_crafted
from flatrock.attacks.written import handed, is_ours, tried, watched
from flatrock.core.borrow import kept_buffers, mode
from flatrock.core.hooks import Shift
from flatrock.core.rng import SampleGen
from flatrock.core.types import Attack, Help, NoisyAttack, PathAttack, Point
from flatrock.engine.helper import Helper
from flatrock.engine.loss import Stage
from flatrock.engine.parts import in_turn


def craft(stage: Stage, shift: Shift) -> tuple[Point, ...]:
    """Attack w + shift in the BatchNorm mode the recipe names, and ask the helper, if there is one, about the result.

    Whatever loss is computed at these points takes the helper's word, and the noise of the attack, from them. The clean
    batch itself without attack.
    """
    points, helper = _noisy(stage, _attacked(stage, shift)), stage.job.helper
    return points if helper is None else tuple(replace(p, help=_helped(stage, helper, p.x_adv)) for p in points)


def _attacked(stage: Stage, shift: Shift) -> tuple[Point, ...]:
    job, attack = stage.job, stage.attack
    if attack is None:
        return (Point(stage.x),)
    split = job.runner.split
    with job.runner.attacked(job.bn_mode, shift) as model:
        parts = [
            _path(stage, attack, model, x, y, _gen(stage, ids))
            for x, y, ids in in_turn(job.model, split(stage.x), split(stage.y), split(stage.ids))
        ]
    return tuple(Point(_whole([p.x_adv for p in same]), same[0].weight) for same in zip(*parts, strict=True))


def _path(stage: Stage, attack: Attack, model: nn.Module, x: Tensor, y: Tensor, gen: SampleGen) -> tuple[Point, ...]:
    """What an attack makes of samples that go through the network at once."""
    threat = stage.job.threat
    with _lent(attack, model, stage.job.bn_mode):
        if isinstance(attack, PathAttack):
            with watched(attack, model):
                path = attack.path(model, handed(attack, x), handed(attack, y), threat, gen)
            return tuple(Point(p.x_adv.detach(), p.weight) for p in path)
        return (Point(tried(attack, model, x, y, threat, gen)),)


@contextmanager
def _lent(attack: Attack, model: nn.Module, bn_mode: str) -> Iterator[None]:
    """The network in the mode named for an attack of the user's, which may change modes, and buffers with them.

    It comes back as it was; only with bn_mode train the statistics are meant to move. Ours leave the mode alone, and
    pay for no copies.
    """
    with ExitStack() as stack:
        if not is_ours(attack):
            stack.enter_context(mode(model, training=bn_mode != "eval"))
            if bn_mode != "train":
                stack.enter_context(kept_buffers(model))
        yield


def _helped(stage: Stage, helper: Helper, x_adv: Tensor) -> Help:
    split = stage.job.runner.split
    parts = [helper(x, there) for x, there in zip(split(stage.x), split(x_adv), strict=True)]
    return Help(_whole([part.x for part in parts]), _whole([part.y for part in parts]))


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """The batch that these are the parts of; the part itself if it is all."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _gen(stage: Stage, ids: Tensor) -> SampleGen:
    """The random numbers of an attack in this step, those of these samples."""
    return stage.job.seed.child("attack", stage.moment.step).samples(ids)


def _noisy(stage: Stage, points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The points with the noise the attack has had on its inputs; drawn anew, as it belongs to samples."""
    attack = stage.attack
    noise = None
    if isinstance(attack, NoisyAttack):
        noise = attack.input_noise(handed(attack, stage.x), _gen(stage, stage.ids))
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
