"""Methods of the user's in a recipe: tried before any work is done, and known by their files."""

from __future__ import annotations

import torch
from torch import Tensor

from flatrock.attacks.catalog import head_of
from flatrock.core.errors import ConfigError, FlatrockError, in_words
from flatrock.core.files import sha256
from flatrock.core.guests import is_own, local, raised_at
from flatrock.core.hooks import Moment, TimedObjective
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.types import Objective, Parts, View, Views
from flatrock.engine.loss import check_parts
from flatrock.engine.schedule import Schedule
from flatrock.models.classifier import Classifier
from flatrock.recipes.schema import Recipe

# Samples of the passes an objective is tried on.
ROWS = 4


def check_loss(name: str, objective: Objective, model: Classifier) -> None:
    """ConfigError unless the objective makes a loss of passes as training gives them, with gradients to descend on.

    They are of the model's classes, of the width of its features, which an objective may have weights of its own for,
    and of inputs of its shape, which it may ask another network about; the model itself is not run.
    """
    gen, classes = Seed(0).child("check").generator(), model.num_classes
    sizes = (model.head.in_features, classes)
    drawn = {p: [torch.randn(ROWS, n, generator=gen).requires_grad_() for n in sizes] for p in objective.passes}
    x = torch.rand(ROWS, *model.input_shape, generator=gen)
    views = {p: View(features, logits, x) for p, (features, logits) in drawn.items()}
    y, ids = torch.arange(ROWS) % classes, torch.arange(ROWS)
    made = Views(views.get("clean"), views.get("adv"), views.get("helper"), y if "helper" in views else None, ids)
    try:
        with torch.enable_grad(), kept_global_rng(torch.get_default_device()):
            first = Moment(epoch=1, step=0, share=0.0, seed=Seed(0).child("check"))
            now = objective.at(first) if isinstance(objective, TimedObjective) else objective
            parts = now.loss(made, y)
            check_parts(parts, f"objective {name!r}")
            total = parts.total
            leaves = [leaf for both in drawn.values() for leaf in both]
            grads = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else ()
    except FlatrockError:
        raise
    except Exception as error:  # it is the user's code: anything can happen
        raise ConfigError(f"the loss of {name} raised {in_words(error)}{raised_at(error, objective)}") from error
    _check_descent(name, parts, grads)


def _check_descent(name: str, parts: Parts, grads: tuple[Tensor | None, ...]) -> None:
    if odd := [term for term, value in parts.terms.items() if not bool(torch.isfinite(value))]:
        raise ConfigError(f"the loss of {name} is not finite on logits of a normal distribution: term {', '.join(odd)}")
    if all(grad is None for grad in grads) and any(parts.weights.values()):
        raise ConfigError(
            f"the loss of {name} has no gradient, so nothing would be learned; leave out .detach() and .item()"
        )


def check_rates(name: str, schedule: Schedule) -> None:
    """The schedule has a rate at the beginning, in the middle and at the end of training."""
    steps = max(int(schedule.epochs), 1)
    try:
        for step in (0, steps // 2, steps - 1):
            schedule.at(step, 1)
    except FlatrockError:
        raise
    except Exception as error:  # it is the user's code: anything can happen
        raise ConfigError(f"{name} raised {in_words(error)}{raised_at(error)}") from error


def origins(recipe: Recipe) -> dict[str, str]:
    """The files of the current folder that a recipe names code in, with a digest of each."""
    specs = [s if isinstance(s, str) else str(s.get("name", "")) for s in (recipe.select.attack,)]
    sections = (recipe.model, recipe.objective, *recipe.flatness, recipe.attack, recipe.optimizer, recipe.schedule)
    names = [*(section.name for section in sections), *(head_of(spec)[0] for spec in specs)]
    files = {local(name.partition(":")[0]) for name in names if is_own(name)}
    return {file.name: sha256(file.read_bytes()) for file in sorted(file for file in files if file is not None)}
