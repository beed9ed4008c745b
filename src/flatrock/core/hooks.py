"""Where a flatness method may act in a training step: four hooks, and the values that pass through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from flatrock.core.rng import Seed
from flatrock.core.team import ALONE, Team
from flatrock.core.types import Attack, Objective, Parts, Point, Views

# What is added to parameters, by name; empty = the weights stay where they are.
Shift = Mapping[str, Tensor]


@dataclass(frozen=True)
class Moment:
    """When a step happens. Random numbers of a method come from `seed.child(<method>, step)`."""

    epoch: int  # counted from 1
    step: int  # since training began, counted from 0
    share: float  # of training done: 0 at the first step, 1 at the last
    seed: Seed


@runtime_checkable
class TimedAttack(Attack, Protocol):
    """An attack that changes from step to step of training (GAT): with the moment, never with what it did before."""

    def at(self, moment: Moment) -> Attack:
        """What attacks in this step."""


@runtime_checkable
class TimedObjective(Objective, Protocol):
    """An objective whose weights change in the course of training (GAT); its passes do not."""

    def at(self, moment: Moment) -> Objective:
        """What is trained on in this step."""


@dataclass(frozen=True)
class Scene:
    """Before the loss: the batch, its adversarial inputs, and what a method may ask the engine for.

    `gradients(shift, points)` is the gradient of the objective (without penalties) w.r.t. every parameter at w + shift,
    in train mode with BatchNorm statistics given back: one forward-backward of the objective. `craft(shift)` attacks
    w + shift anew.
    """

    model: nn.Module
    moment: Moment
    points: tuple[Point, ...]
    gradients: Callable[[Shift, tuple[Point, ...]], dict[str, Tensor]]
    craft: Callable[[Shift], tuple[Point, ...]]


@dataclass(frozen=True)
class Nudge:
    """Weights the loss sees: w + shift, and the adversarial inputs that belong to them.

    `step_inside`: the optimizer steps (decay and momentum included) at w + shift, and the change is carried over to w;
    otherwise w is put back first and only the gradient comes from w + shift.
    """

    shift: Shift
    points: tuple[Point, ...]
    step_inside: bool = False


@dataclass(frozen=True)
class Look:
    """In the loss: one batch after its network passes."""

    model: nn.Module
    x: Tensor
    x_adv: Tensor
    y: Tensor  # class indices (-1 = unlabeled) or rows of class probabilities
    views: Views
    parts: Parts  # the objective alone
    moment: Moment
    x_helper: Tensor | None = None  # inputs of the helper's pass, where the objective makes one
    team: Team = ALONE  # `total` of it: what a sum over the whole batch is, if others have parts


@dataclass(frozen=True)
class Penalty:
    """Terms to add to the loss; `label_factor` multiplies the objective's LABEL_TERMS."""

    terms: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    label_factor: float = 1.0


class Flatness:
    """A flatness method: every hook does nothing unless overridden, and nothing is what a zero strength must give."""

    # Network passes ('clean', 'adv') it looks at; the engine adds those the objective does not make.
    needs: ClassVar[tuple[str, ...]] = ()
    # Whether it is nothing without adversarial inputs.
    needs_attack: ClassVar[bool] = False
    # Whether it moves the weights the loss sees, and whether it keeps an average: one of each per recipe.
    moves_weights: ClassVar[bool] = False
    averages: ClassVar[bool] = False

    @property
    def steps_inside(self) -> bool:
        """Whether the optimizer steps at the moved weights (only if `moves_weights`)."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether it differentiates the network more than once, which passes of a fast engine do not allow."""
        return False

    @property
    def takes_whole_batch(self) -> bool:
        """Whether it runs the network itself, on all of a batch at once, so that batches cannot go in parts."""
        return self.needs_reference

    def before_attack(self, model: nn.Module, moment: Moment) -> Shift:
        """What the attack sees is w + shift. Asked again in a step, for another attack, it gives the same."""
        return {}

    def before_loss(self, scene: Scene) -> Nudge | None:
        """What the loss sees; None leaves weights and inputs as they are."""
        return None

    def in_loss(self, look: Look) -> Penalty | None:
        """What is added to the loss."""
        return None

    def after_step(self, model: nn.Module, moment: Moment) -> None:
        """Called after the optimizer's step."""

    def average(self) -> Mapping[str, Tensor]:
        """Averaged parameters by name (only if `averages`); empty before there are any."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What must survive a stop."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of state."""

    @property
    def bn_batches(self) -> int:
        """Training batches from which the average's BatchNorm statistics are re-estimated; 0 = the live ones."""
        return 0

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError or ModelError if the method cannot work on this network (its weights may be absent)."""

    def check_objective(self, objective: Objective) -> None:
        """Raise ConfigError if the method has no meaning for this objective."""

    def passes(self, objective: int, attack: int) -> int:
        """Forward passes it adds to a step whose objective and attack make this many."""
        return 0
