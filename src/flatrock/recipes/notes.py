"""What a recipe says and will not do, told before any work. Codes: docs/diagnostics.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from flatrock.attacks.catalog import ATTACKS, Spec, parse_attack
from flatrock.attacks.gaussian import Gaussian
from flatrock.attacks.gradient import GradientAttack, idle
from flatrock.attacks.smooth import SmoothPGD
from flatrock.core.errors import ConfigError
from flatrock.core.guests import is_own
from flatrock.core.hooks import Flatness
from flatrock.core.threat import THREATS
from flatrock.engine.schedule import Piecewise, Schedule, time_at
from flatrock.flatness.awp import AWP
from flatrock.flatness.catalog import FLATNESS
from flatrock.flatness.swa import SWA
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.objectives.gat import GAT
from flatrock.recipes.own import sums
from flatrock.recipes.pieces import build_model, build_schedule
from flatrock.recipes.schema import Recipe

# After so many times 1 / (1 - decay) updates, what an exponential average began with weighs 5 % of it.
HORIZONS = 3
# A copy taken later than this share of training is no beginner's, so more of it may be left: but not so much that the
# average is little else.
LATE = 0.5
MUCH = 0.1
# An attack that could not leave this share of its ball, were all its steps in one direction; less than one usual step.
NARROW = 0.2


@dataclass(frozen=True)
class Span:
    """How long a run is: epochs as the recipe counts them, steps in each, and how many it will make."""

    epochs: int
    per_epoch: int
    steps: int

    def since(self, share: float) -> int:
        """How many steps come at this share of training or later; as Moment counts it."""
        last = max(self.epochs * self.per_epoch - 1, 1)
        return sum(step / last >= share for step in range(self.steps))

    def __str__(self) -> str:
        cut = "" if self.steps == self.epochs * self.per_epoch else f" ({self.steps} steps of train.max_steps)"
        return f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}{cut}"


def notes(recipe: Recipe, *, per_epoch: int | None) -> list[str]:
    """A line for each thing that will not happen or means little; `per_epoch` None: how many steps is not known."""
    found = [*_idle(recipe), *_sums(recipe)]
    if per_epoch is not None:
        span = Span(recipe.train.epochs, per_epoch, recipe.train.steps(per_epoch))
        flatness = {f.name: FLATNESS.make(f.name, **f.options) for f in recipe.flatness}
        found += [*_milestones(build_schedule(recipe), span), *_waiting(recipe, flatness, span)]
        found += _horizon(flatness, span)
    return [f"{text} (docs/diagnostics.md)" for text in found]


def _sums(recipe: Recipe) -> Iterator[str]:
    """Of an objective of the user's. It may be meant, or have been trained on before: it is no fault."""
    name = recipe.objective.name
    if is_own(name):
        with nullcontext() if is_own(recipe.model.name) else torch.device("meta"):
            model = build_model(recipe)
        yield from (f"T12 {said}" for said in sums(name, OBJECTIVES.make(name, **recipe.objective.options), model))


def _milestones(schedule: Schedule, span: Span) -> Iterator[str]:
    if not isinstance(schedule, Piecewise):
        return
    end = time_at(span.steps - 1, span.per_epoch, schedule.clock)
    if late := [f"{m:g}" for m in schedule.milestones if m > end]:
        never = "never drops" if len(late) == len(schedule.milestones) else "does not drop as often as it says"
        many = len(late) > 1
        yield (
            f"T06 the rate {never}: milestone{'s' if many else ''} {', '.join(late)} lie{'' if many else 's'} beyond "
            f"{span}; set schedule.milestones"
        )


def _waiting(recipe: Recipe, flatness: Mapping[str, Flatness], span: Span) -> Iterator[str]:
    """What waits for a time that does not come."""
    for name, method in flatness.items():
        epochs = -(-span.steps // span.per_epoch)
        if isinstance(method, AWP) and method.gamma > 0 and method.warmup > epochs:
            yield f"T06 {name} never acts: its warmup {method.warmup} lies beyond {span}; set flatness.{name}.warmup"
        if isinstance(method, SWA) and not span.since(method.start):
            yield f"T06 {name} never averages: its start {method.start:g} is not reached in {span}; set it lower"
    objective = OBJECTIVES.make(recipe.objective.name, **recipe.objective.options)
    if isinstance(objective, GAT) and not span.since(share := objective.rise_after):
        yield f"T06 the weight of gat never rises: rise_after {share:g} is not reached in {span}; set it lower"


def _horizon(flatness: Mapping[str, Flatness], span: Span) -> Iterator[str]:
    """An exponential average without ramp that the run is too short for."""
    for name, method in flatness.items():
        reached = span.since(method.start) if isinstance(method, SWA) else 0
        if not isinstance(method, SWA) or method.decay is None or method.ramp or not reached:
            continue
        updates, horizon, left = reached - 1, 1 / (1 - method.decay), method.decay ** (reached - 1)
        if left <= MUCH if method.start >= LATE else updates >= HORIZONS * horizon:
            continue
        smaller = 1 - HORIZONS / updates if updates > HORIZONS else 0.0
        cures = [f"flatness.{name}.ramp=true", f"a decay of at most {smaller:.3g}"]
        if method.start < LATE and method.decay ** max(span.since(LATE) - 1, 0) <= MUCH:
            cures.append(f"a start of {LATE} or later")
        yield (
            f"T07 {name} averages {updates} updates, fewer than {HORIZONS} horizons 1/(1 - decay) = {horizon:.4g}: "
            f"at the end {100 * left:.0f} % of the average are still the weights it began with, "
            f"after {span.steps - updates} of {span.steps} steps; set {', '.join(cures[:-1])} or {cures[-1]}"
        )


def _idle(recipe: Recipe) -> Iterator[str]:
    """Attacks that were told to make no step, or steps that lead nowhere."""
    inner = None if recipe.attack.name == "none" else ATTACKS.make(recipe.attack.name, **recipe.attack.options)
    threat = THREATS[recipe.threat.norm](recipe.threat.eps)
    noisy = isinstance(inner, Gaussian) or (isinstance(inner, SmoothPGD) and inner.sigma > 0)
    if inner is not None and not noisy and threat.eps == 0:
        yield "T08 threat.eps is 0: no attack moves anything, and training is without one; set threat.eps"
    elif inner is not None and idle(inner):
        yield "T08 no gradient step is made by the attack in training: it trains on noise; set attack.steps"
    elif isinstance(inner, GradientAttack) and (way := inner.reach(threat)) < NARROW * threat.eps:
        yield (
            f"T08 all steps of the attack in training lead {way:.3g} far, in a ball of {threat.eps:.3g}: it hardly "
            "leaves where it starts; set attack.step_size or attack.steps"
        )
    specs: dict[str, Sequence[Spec]] = {"select.attack": [recipe.select.attack]}
    specs |= {"evaluate.attacks": recipe.evaluate.attacks}
    specs |= {f"evaluate.more.{i}": one.attacks for i, one in enumerate(recipe.evaluate.more)}
    for key, listed in specs.items():
        for spec in listed:
            try:
                label, one = parse_attack(spec)
            except ConfigError:  # a plan, or one that is crafted on a surrogate
                continue
            if idle(one):
                yield f"T08 no gradient step is made by {label} of {key}: it is noise; give it steps, such as pgd-20"
