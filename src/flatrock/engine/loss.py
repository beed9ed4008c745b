"""The loss of one batch: network passes, the objective, and what flatness methods and penalties add to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from flatrock.core.borrow import kept_buffers, nudged
from flatrock.core.errors import TrainingError, shown
from flatrock.core.hooks import Flatness, Look, Moment, Penalty, Shift, TimedAttack, TimedObjective
from flatrock.core.types import LABEL_TERMS, Attack, Objective, Parts, Point, View, Views
from flatrock.engine.job import Job
from flatrock.engine.own import hook_of, reading
from flatrock.engine.parts import running_statistics
from flatrock.engine.runner import Runner

# What the norm of a gradient is called among the terms of a loss, where gradients are clipped.
GRAD_NORM = "grad_norm"
# No more batches than this go through the network in one graph, whose activations are held at once.
TOGETHER = 6


@dataclass(frozen=True)
class Stage:
    """One batch at its step."""

    job: Job
    x: Tensor
    y: Tensor
    ids: Tensor
    moment: Moment
    share: float = 1.0  # of the whole batch, if other processes have the rest of it

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters with gradients to be, by name; all processes have the same ones."""
        there = dict(self.job.model.named_parameters())
        asked = self.moment.step % len(self.job.loader) == 0
        return {n: there[n] for n in self.job.team.agreed([n for n in there if there[n].requires_grad], anew=asked)}

    @property
    def attack(self) -> Attack | None:
        """The job's, as it is at this moment."""
        attack = self.job.attack
        return attack.at(self.moment) if isinstance(attack, TimedAttack) else attack

    @property
    def objective(self) -> Objective:
        """The job's, as it is at this moment."""
        objective = self.job.objective
        return objective.at(self.moment) if isinstance(objective, TimedObjective) else objective


@dataclass(frozen=True)
class Descent:
    """What a backward pass leaves beside the gradients: the loss and its terms by name, and the last passes."""

    losses: dict[str, Tensor]
    views: Views


def seen_inputs(x: Tensor, point: Point) -> dict[str, Tensor]:
    """What the network is given in each pass: clean, adversarial and the helper's inputs, with the point's noise."""
    where = {"clean": x, "adv": point.x_adv}
    if point.help is not None:
        where["helper"] = point.help.x
    return where if point.noise is None else {name: inputs + point.noise for name, inputs in where.items()}


def run_passes(
    runner: Runner, passes: Sequence[str], x: Tensor, points: Sequence[Point], ids: Tensor | None = None
) -> list[Views]:
    """Run the named passes in order, at one point after the other.

    A repeated one is run without gradient, for BatchNorm's sake only.
    """
    places = [seen_inputs(x, point) for point in points]
    if len(set(passes)) == len(passes):
        found = iter(runner.views(*(where[name] for where in places for name in passes)))
        seen = [{name: next(found) for name in passes} for _ in points]
    else:
        seen = [_one_by_one(runner, passes, where) for where in places]
    return [_views(where, views, point, ids) for where, views, point in zip(places, seen, points, strict=True)]


def _one_by_one(runner: Runner, passes: Sequence[str], where: Mapping[str, Tensor]) -> dict[str, View]:
    seen: dict[str, View] = {}
    for name in passes:
        with torch.set_grad_enabled(name not in seen and torch.is_grad_enabled()):
            view = runner.view(where[name])
        seen.setdefault(name, view)
    return seen


def _views(where: Mapping[str, Tensor], seen: Mapping[str, View], point: Point, ids: Tensor | None) -> Views:
    labels = None if point.help is None else point.help.y
    told = {name: replace(view, x=where[name]) for name, view in seen.items()}
    return Views(told.get("clean"), told.get("adv"), told.get("helper"), labels, ids)


def _groups(stage: Stage, passes: Sequence[str], points: Sequence[Point]) -> list[Sequence[Point]]:
    """Points whose passes share a graph, whose activations are held at once: each for itself, unless compiled.

    Compiled, several batches make fewer and larger kernels. Groups are of one size, as each is compiled anew.
    """
    size, runner = 1, stage.job.runner
    if len(set(passes)) == len(passes):
        for some in (n for n in range(TOGETHER // len(passes), 1, -1) if len(points) % n == 0):
            if runner.joins([seen_inputs(stage.x, point)[name] for point in points[:some] for name in passes]):
                size = some
                break
    return [points[begin : begin + size] for begin in range(0, len(points), size)]


def decayed(model: nn.Module) -> list[nn.Parameter]:
    """The weights penalties act on: all parameters but biases and normalisation layers' (1-D tensors)."""
    return [p for p in model.parameters() if p.dim() > 1]


def objective_gradients(stage: Stage, shift: Shift, points: Sequence[Point]) -> dict[str, Tensor]:
    """Gradient of the objective alone w.r.t. every parameter at w + shift; BatchNorm statistics are given back."""
    job, objective = stage.job, stage.objective
    parameters, passes = stage.trained(), tuple(dict.fromkeys(objective.passes))
    asked = [n for n, p in parameters.items() if p.requires_grad]
    found: dict[str, Tensor] = {}
    groups = _groups(stage, passes, points)
    with kept_buffers(job.model), nudged(job.model, shift):
        for group in groups:
            shares = [
                _weighted(_loss(stage, views).total, point.weight)
                for point, views in zip(group, run_passes(job.runner, passes, stage.x, group, stage.ids), strict=True)
            ]
            made = torch.autograd.grad(sum(shares[1:], shares[0]), [parameters[n] for n in asked], allow_unused=True)
            there = {name: grad for name, grad in zip(asked, made, strict=True) if grad is not None}
            if len(groups) > 1:  # out of the memory of compiled passes, which the next group overwrites
                there = {name: found[name] + g if name in found else g.clone() for name, g in there.items()}
            found |= there
    return job.team.mean_found({n: found.get(n) for n in parameters}, parameters, stage.share)


def descend(stage: Stage, points: Sequence[Point]) -> Descent:
    """Leave the gradient of the whole loss in `.grad`, clipped if the recipe says so."""
    job = stage.job
    job.optimizer.zero_grad(set_to_none=True)
    losses: dict[str, Tensor] = {}
    for i, group in enumerate(_groups(stage, job.passes, points)):
        if i == 1:  # from now on gradients are added to what the first points left
            job.runner.settle()
        shares = []
        for point, views in zip(group, run_passes(job.runner, job.passes, stage.x, group, stage.ids), strict=True):
            parts = _with_flatness(stage, point, views)
            shares.append(_weighted(parts.total, point.weight))
            _add(losses, parts, point.weight)
        sum(shares[1:], shares[0]).backward()  # type: ignore[no-untyped-call]
    penalties = _weight_penalties(job)
    if penalties is not None:
        penalties.total.backward()  # type: ignore[no-untyped-call]
        _add(losses, penalties, 1.0)
    _share(stage, losses)
    if job.clip_norm is not None:
        losses[GRAD_NORM] = _clip(job.model, job.clip_norm)
    return Descent(losses, views)


def _clip(model: nn.Module, most: float) -> Tensor:
    """g <- g * min(1, most / (||g|| + 1e-6)), one norm over all parameters; the norm g had. Nobody waits for a GPU.

    Of the whole batch, devices included. Only what is stepped on is clipped: an ascent takes directions of gradients.
    """
    return nn.utils.clip_grad_norm_(model.parameters(), most)


def _share(stage: Stage, losses: dict[str, Tensor]) -> None:
    """Gradients, losses and BatchNorm statistics of all processes' parts as those of the whole batch."""
    job = stage.job
    if job.team.alone:
        return
    parameters = stage.trained()
    values = torch.stack(list(losses.values())).float()
    also = [*running_statistics(job.model), values]
    shared = job.team.mean_found({n: p.grad for n, p in parameters.items()}, parameters, stage.share, also)
    for name, parameter in parameters.items():  # one that nobody has a gradient of is left to itself, as alone
        parameter.grad = shared.get(name)
    losses.update(zip(losses, values.unbind(), strict=True))


def _weighted(loss: Tensor, weight: float) -> Tensor:
    return loss if weight == 1 else weight * loss


def _add(losses: dict[str, Tensor], parts: Parts, weight: float) -> None:
    for name, value in {"total": parts.total, **parts.terms}.items():
        share = _weighted(value.detach(), weight)
        losses[name] = losses[name] + share if name in losses else share


def _with_flatness(stage: Stage, point: Point, views: Views) -> Parts:
    """The objective and what every method adds; a method sees the objective alone, so their order does not matter."""
    parts = _loss(stage, views)
    where, job = seen_inputs(stage.x, point), stage.job
    look = Look(
        job.model, where["clean"], where["adv"], stage.y, views, parts, stage.moment, where.get("helper"), team=job.team
    )
    added = [p for name, method in job.flatness.items() if (p := _penalty(name, method, look)) is not None]
    return joined(parts, added) if added else parts


def _loss(stage: Stage, views: Views) -> Parts:
    """The objective alone."""
    objective = stage.objective
    with reading(views, "the objective", objective, key="passes", has=objective.passes):
        parts = objective.loss(views, stage.y)
    check_parts(parts, "the objective")
    return parts


def _penalty(name: str, method: Flatness, look: Look) -> Penalty | None:
    """What a method adds."""
    with reading(look.views, f"in_loss of flatness {name}", method, key="needs", has=method.needs):
        penalty = method.in_loss(look)
    if penalty is not None:
        check_parts(penalty, hook_of(name, method, "in_loss"), Penalty)
    return penalty


def check_parts(parts: Parts | Penalty, owner: str, kind: type[Parts] | type[Penalty] = Parts) -> None:
    """TrainingError, naming the term, unless all of them are scalars with a weight; values are not looked at."""
    if not isinstance(parts, kind):
        raise TrainingError(f"{owner} gave {shown(parts)}, not flatrock.core's {kind.__name__}(terms, weights)")
    for name, term in parts.terms.items():
        if not isinstance(term, Tensor) or term.dim():
            raise TrainingError(f"{owner}: term {name!r} is {shown(term)}, not a scalar tensor; take its .mean()")
        if name not in parts.weights:
            raise TrainingError(f"{owner}: term {name!r} has no weight, there are {list(parts.weights)}; give it one")


def joined(parts: Parts, added: Sequence[Penalty]) -> Parts:
    """One sum; weight that soft labels take is taken from the objective's label terms."""
    terms, weights = dict(parts.terms), dict(parts.weights)
    for penalty in added:
        for name in set(LABEL_TERMS) & parts.terms.keys():
            weights[name] = penalty.label_factor * weights[name]
        terms |= penalty.terms
        weights |= penalty.weights
    return Parts(terms, weights)


def _weight_penalties(job: Job) -> Parts | None:
    """l1 * sum|w| and l2 * sum w^2 / 2 where the recipe asks for them."""
    terms: dict[str, Tensor] = {}
    if job.l1:
        terms["l1"] = torch.stack([p.abs().sum() for p in decayed(job.model)]).sum()
    if job.l2:
        terms["l2"] = torch.stack([p.square().sum() for p in decayed(job.model)]).sum() / 2
    return Parts(terms, {"l1": job.l1, "l2": job.l2}) if terms else None
