"""Methods of the user's in a recipe: tried before any work is done, and known by their files."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flatrock.attacks.catalog import head_of
from flatrock.core.errors import ConfigError, FlatrockError, in_words
from flatrock.core.files import sha256
from flatrock.core.guests import is_own, local, raised_at, written_at
from flatrock.core.hooks import Moment, TimedObjective
from flatrock.core.rng import Seed, kept_global_rng
from flatrock.core.types import Objective, Parts, View, Views
from flatrock.engine.loss import check_parts
from flatrock.engine.own import told_unread, unread
from flatrock.engine.schedule import Schedule
from flatrock.models.classifier import Classifier
from flatrock.recipes.schema import Recipe

# Samples of the passes an objective is tried on.
ROWS = 4
# What a term is about that is this near to it, relatively; and what is nothing to compare with.
NEAR = 1e-3
TINY = 1e-6


@dataclass(frozen=True)
class Trial:
    """Passes of made-up samples, as training gives them, and the tensors that gradients are asked of."""

    views: Views
    y: Tensor
    leaves: tuple[Tensor, ...] = ()

    def of(self, rows: Tensor) -> Trial:
        """Those of some samples, in this order, an index twice for one that is there twice."""
        seen = {name: _rows(getattr(self.views, name), rows) for name in ("clean", "adv", "helper")}
        labels = None if self.views.helper_y is None else self.views.helper_y[rows]
        assert self.views.ids is not None
        return Trial(Views(**seen, helper_y=labels, ids=self.views.ids[rows]), self.y[rows])


def _rows(view: View | None, rows: Tensor) -> View | None:
    if view is None or view.x is None:
        return None
    features, logits = (tensor[rows].detach().requires_grad_() for tensor in (view.features, view.logits))
    return View(features, logits, view.x[rows])


def _trial(objective: Objective, model: Classifier) -> Trial:
    """Passes of the model's classes, of the width of its features, which an objective may have weights of its own for,
    and of inputs of its shape, which it may ask another network about; the model itself is not run."""
    gen, classes = Seed(0).child("check").generator(), model.num_classes
    sizes = (model.head.in_features, classes)
    drawn = {p: [torch.randn(ROWS, n, generator=gen).requires_grad_() for n in sizes] for p in objective.passes}
    x = torch.rand(ROWS, *model.input_shape, generator=gen)
    views = {p: View(features, logits, x) for p, (features, logits) in drawn.items()}
    y, ids = torch.arange(ROWS) % classes, torch.arange(ROWS)
    made = Views(views.get("clean"), views.get("adv"), views.get("helper"), y if "helper" in views else None, ids)
    return Trial(made, y, tuple(leaf for both in drawn.values() for leaf in both))


def check_loss(name: str, objective: Objective, model: Classifier) -> None:
    """ConfigError unless the objective makes a loss of passes as training gives them, with gradients to descend on."""
    trial = _trial(objective, model)
    try:
        with torch.enable_grad(), kept_global_rng(torch.get_default_device()):
            parts = _now(objective).loss(trial.views, trial.y)
            check_parts(parts, f"objective {name!r}")
            total = parts.total
            grads = torch.autograd.grad(total, trial.leaves, allow_unused=True) if total.requires_grad else ()
    except FlatrockError:
        raise
    except Exception as error:  # it is the user's code: anything can happen
        at = raised_at(error, objective)
        if isinstance(error, AttributeError) and (passes := unread(error, trial.views)):
            said = told_unread(f"the loss of {name}", passes, at, key="passes", has=objective.passes)
            raise ConfigError(said) from error
        raise ConfigError(f"the loss of {name} raised {in_words(error)}{at}") from error
    _check_descent(name, parts, grads)


def _now(objective: Objective) -> Objective:
    """The objective at the first step."""
    first = Moment(epoch=1, step=0, share=0.0, seed=Seed(0).child("check"))
    return objective.at(first) if isinstance(objective, TimedObjective) else objective


def _values(parts: Parts) -> dict[str, float]:
    return {name: float(term.detach()) for name, term in parts.terms.items()}


def sums(name: str, objective: Objective, model: Classifier) -> list[str]:
    """Terms that are sums over the batch, not means: that of samples there twice is twice as large, and those of two
    halves add up to that of the whole.

    What looks at the batch as a whole (its variance, pairs of samples) may well do one of the two.
    """
    trial, every = _trial(objective, model), torch.arange(ROWS)
    try:
        with kept_global_rng(torch.get_default_device()), torch.enable_grad():
            now = _now(objective)
            some = [trial.of(rows) for rows in (every, every.repeat(2), every[: ROWS // 2], every[ROWS // 2 :])]
            parts, *others = [now.loss(one.views, one.y) for one in some]
    except Exception:  # a loss need not take batches of another size
        return []
    twice, *halves = map(_values, others)
    found = []
    for term, once in _values(parts).items():
        if parts.weights[term] == 0 or abs(once) < TINY or any(term not in known for known in (twice, *halves)):
            continue
        added = sum(half[term] for half in halves)
        if math.isclose(twice[term], 2 * once, rel_tol=NEAR) and math.isclose(added, once, rel_tol=NEAR):
            found.append(
                f"the loss of {name} is a sum over the batch, not a mean{written_at(type(objective).loss)}: with every "
                f"sample twice, term {term!r} is {twice[term]:.4g} instead of {once:.4g}; take its .mean() over the "
                "samples, or divide by len(y)"
            )
    return found


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
