"""A training job: every ready-made object one run needs, in one frozen bundle. Recipes build it, the loop eats it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatrock.core.hooks import Flatness, Moment
from flatrock.core.rng import Seed
from flatrock.core.team import ALONE, Team
from flatrock.core.threat import Threat
from flatrock.core.types import Attack, Objective
from flatrock.data.loader import TensorLoader
from flatrock.engine.helper import Helper
from flatrock.engine.runner import Runner
from flatrock.engine.schedule import Schedule


@dataclass(frozen=True)
class ProbeOutcome:
    """What the selection data say about the current weights; accuracies are fractions."""

    clean: float
    robust: float
    train_robust: float
    collapsed: bool


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which epochs (counted from 1) keep their weights beside `best` and `last`.

    RAT keeps 100-109, 150-159 and every 5th from 100; AWP every 10th.
    """

    every: int | None = None
    after: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    def wants(self, epoch: int) -> bool:
        """Whether the weights after this epoch are kept."""
        regular = self.every is not None and epoch >= self.after and epoch % self.every == 0
        return regular or any(first <= epoch <= last for first, last in self.windows)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything `engine.loop.train` needs; test data are not in it unless the recipe selects on them."""

    name: str
    folder: Path
    recipe: Mapping[str, Any]
    recipe_hash: str
    data_digest: str
    class_names: tuple[str, ...]
    num_classes: int
    seed: Seed
    device: torch.device
    runner: Runner
    objective: Objective
    flatness: Mapping[str, Flatness]
    threat: Threat
    attack: Attack | None
    bn_mode: str
    loader: TensorLoader
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    epochs: int
    max_steps: int | None
    l1: float
    l2: float
    mixup_alpha: float
    clean_tick: bool
    probe: Callable[[nn.Module], ProbeOutcome]
    probe_every: int
    selected_on: str
    select_metric: str
    keep: Keep
    save_seconds: float
    tensorboard: bool
    clip_norm: float | None = None  # the largest norm of a gradient that is stepped on
    helper: Helper | None = None
    cutmix_alpha: float = 0.0
    selected_from: int = 0  # samples the best epoch is chosen on
    notes: tuple[str, ...] = ()  # what is known before the first step of how it will go, each with its code
    start: str | None = None  # digest of the weights it begins with; None: they are drawn, or a resumed run has its own
    team: Team = ALONE
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """The network that is trained: the one the runner runs."""
        return self.runner.model

    def moment(self, step: int) -> Moment:
        """When the step with this number, counted from 0, happens."""
        last = max(self.epochs * len(self.loader) - 1, 1)
        return Moment(epoch=step // len(self.loader) + 1, step=step, share=step / last, seed=self.seed)

    @property
    def passes(self) -> tuple[str, ...]:
        """The network passes of one loss: the objective's, then those only a flatness method looks at."""
        wanted = [name for method in self.flatness.values() for name in method.needs]
        return (*self.objective.passes, *(n for n in dict.fromkeys(wanted) if n not in self.objective.passes))

    @property
    def findings(self) -> dict[str, str]:
        """What a fast engine could not do, by code."""
        return self.runner.findings | ({} if self.helper is None else self.helper.findings)

    @property
    def averaging(self) -> Flatness | None:
        """The method that keeps averaged weights, if there is one."""
        return next((m for m in self.flatness.values() if m.averages), None)
