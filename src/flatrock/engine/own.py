"""What a flatness method of the user's gives in a step, looked at where it is taken.

Types, names, shapes and devices only: the host knows these, nothing waits for a GPU. Ours are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flatrock.core.errors import TrainingError, shown
from flatrock.core.guests import of_flatrock, raised_at, written_at
from flatrock.core.hooks import Flatness, Nudge, Scene, Shift
from flatrock.core.registry import unknown
from flatrock.core.types import Point, View, Views

# Passes a method can ask for.
PASSES = ("clean", "adv")


def hook_of(name: str, method: Flatness, hook: str) -> str:
    """What a message calls a hook of a method, with the line it is written at if it is the user's."""
    at = "" if of_flatrock(method) else written_at(getattr(method, hook))
    return f"{hook} of flatness {name}{at}" if at else f"flatness {name}"


def shift_of(name: str, method: Flatness, hook: str, shift: Shift | None, model: nn.Module) -> Shift:
    """Tensors by the name of a parameter that a hook gave, if they fit the parameters; TrainingError if not."""
    if of_flatrock(method) or shift is None:
        return shift or {}
    owner, given = hook_of(name, method, hook), _other(shift)
    if not isinstance(given, Mapping):
        raise TrainingError(
            f"{owner} gave {shown(given)}, not tensors by the names of parameters; return a dict such as "
            "{'head.weight': tensor}, or {} for nothing"
        )
    parameters = dict(model.named_parameters())
    for key, tensor in given.items():
        if key not in parameters:
            cure = "; names are those of model.named_parameters()"
            raise TrainingError(f"{owner} names what is none: {unknown('parameter', key, parameters, more=cure)}")
        weight, moves = parameters[key], hook != "average"  # which is copied, from wherever it is
        if not isinstance(tensor, Tensor) or not _fits(tensor.shape, weight.shape, added=moves):
            raise TrainingError(
                f"{owner} gave {shown(tensor)} for {key!r}, which has shape {list(weight.shape)}; give a tensor of "
                "that shape, such as torch.zeros_like(parameter)"
            )
        if moves and tensor.dim() and tensor.device != weight.device:
            raise TrainingError(
                f"{owner} gave a tensor on {tensor.device} for {key!r}, which is on {weight.device}; "
                "add .to(parameter) to it"
            )
    return shift


def nudge_of(name: str, method: Flatness, nudge: Nudge | None, scene: Scene) -> Nudge | None:
    """What `before_loss` gave, if the loss can be computed there; TrainingError if not."""
    if of_flatrock(method) or nudge is None:
        return nudge
    owner, given = hook_of(name, method, "before_loss"), _other(nudge)
    if not isinstance(given, Nudge):
        raise TrainingError(
            f"{owner} gave {shown(given)}, not flatrock.core.hooks.Nudge(shift, points); return "
            "Nudge(shift, scene.points), or None for nothing"
        )
    shift_of(name, method, "before_loss", given.shift, scene.model)
    points, wanted = _other(given.points), scene.points[0].x_adv.shape
    fit = isinstance(points, Sequence) and points and all(isinstance(p, Point) for p in points)
    if not fit or any(p.x_adv.shape != wanted for p in given.points):
        raise TrainingError(
            f"{owner} gave a Nudge whose points are {shown(points)}, not those of the batch, of inputs "
            f"{list(wanted)}; give scene.points, or scene.craft(shift)"
        )
    return given


def state_of(name: str, method: Flatness) -> dict[str, Tensor]:
    """What must survive a stop, if it can be stored; TrainingError if not."""
    state, owner = method.state(), hook_of(name, method, "state")
    given = _other(state)
    odd = [given] if not isinstance(given, dict) else [v for v in given.values() if not isinstance(v, Tensor)]
    if odd:
        raise TrainingError(
            f"{owner} gave {shown(odd[0])}, not tensors by name; store a number as torch.tensor(number)"
        )
    return state


@contextmanager
def reading(views: Views, owner: str, method: object, *, key: str, has: Sequence[str]) -> Iterator[None]:
    """Code of the user's inside that reads a pass it did not ask for is told how to ask: by `key`, beside `has`."""
    try:
        yield
    except AttributeError as error:
        passes = () if of_flatrock(method) else unread(error, views)
        if not passes:
            raise
        raise TrainingError(told_unread(owner, passes, raised_at(error, method), key=key, has=has)) from error


def unread(error: AttributeError, views: Views) -> tuple[str, ...]:
    """The passes that were not made, if an error comes from reading one of them."""
    of_view = error.obj is None and error.name in View.__dataclass_fields__
    return tuple(name for name in PASSES if getattr(views, name) is None) if of_view else ()


def told_unread(owner: str, passes: Sequence[str], at: str, *, key: str, has: Sequence[str]) -> str:
    """What is said of reading a pass that was not made."""
    wanted = tuple(name for name in PASSES if name in (*has, *passes))
    which = " or ".join(f"views.{name}" for name in passes)
    return f"{owner} reads {which}, which is None{at}: its {key} are {tuple(has)!r}; set `{key} = {wanted!r}`"


def _fits(shape: torch.Size, wanted: torch.Size, *, added: bool) -> bool:
    """Whether a tensor has the wanted shape, or, if it is added, one that is spread to it."""
    if shape == wanted or not added:
        return shape == wanted
    aligned = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(one in (1, other) for one, other in aligned)


def _other(given: object) -> object:
    """What the user's code gave may be anything, whatever its type says."""
    return given
