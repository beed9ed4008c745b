"""Attacks that seek the nearest adversarial point, asked how far it lies instead of whether it lies in the ball."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatrock.attacks.boundary import FastAdaptiveBoundary
from flatrock.attacks.rays import RayS, follow_rays
from flatrock.core.rng import SampleGen
from flatrock.core.threat import Linf, Threat
from flatrock.core.types import Attack


class Reached(NamedTuple):
    """The nearest adversarial point found for each sample and its distance; inf, and any point, where none was."""

    points: Tensor
    distances: Tensor


Seeker = Callable[[nn.Module, Tensor, Tensor, Threat, SampleGen], Reached]


def seeker(attack: Attack, threat: Threat) -> Seeker | None:
    """How this attack measures distances in the norm of the threat, at the price of its whole budget; None if not.

    `fab` and `fab-t` measure in any norm, `rays` in linf. The radius of the threat limits nothing; it only scales
    random restarts of `fab`.
    """
    if isinstance(attack, FastAdaptiveBoundary):
        return _by_boundary(attack)
    if isinstance(attack, RayS) and threat.norm == Linf.norm:
        return _by_rays(attack)
    return None


def _by_boundary(attack: FastAdaptiveBoundary) -> Seeker:
    def seek(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen) -> Reached:
        found = attack.search(model, x, y, threat, gen)
        return Reached(found.points, found.distance)

    return seek


def _by_rays(attack: RayS) -> Seeker:
    def seek(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, gen: SampleGen) -> Reached:
        with torch.no_grad():
            points, radius, _ = follow_rays(model, x, y, queries=attack.queries, tolerance=attack.tolerance)
        # Clipping to the box can leave the point nearer than the radius along the ray.
        return Reached(points, torch.where(torch.isfinite(radius), threat.size(points - x), torch.inf))

    return seek
