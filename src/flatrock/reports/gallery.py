"""Broken samples as a PNG: the image, what broke it, and their difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatrock.core import options
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.records import Result
from flatrock.core.threat import THREATS
from flatrock.reports.style import blank, finish
from flatrock.reports.waterfall import caption, order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Differences are drawn larger, around grey: by the first of these factors that clips none of them.
FACTORS = (10, 5, 2, 1)
COLUMNS = 10
# Rounding of x + delta may leave the ball by this much.
SLACK = 1e-6


def gallery(x: Tensor, result: Result, path: Path, *, count: int = 10, names: Sequence[str] | None = None) -> Path:
    """Draw up to `count` broken samples, spread over the set, in three rows: clean, adversarial, difference up to x10.

    `x` are the inputs that were evaluated, [n, 1 or 3, height, width]; `result` must hold what broke them
    (keep_adversarial). Above each sample stand its true class, which the model gives to the clean image too (only such
    samples are attacked), z_true minus the largest other logit on the clean input and at worst, and the first attack
    that broke it.
    """
    options.count("gallery", "count", count, least=1)
    x_adv = _checked(x, result)
    rows = _broken(result, count)
    classes = _classes(result, rows, names)
    columns = min(len(rows), COLUMNS)
    blocks = -(-len(rows) // columns)
    factor = _factor((x_adv[rows] - x[rows].cpu()).abs().max())
    figure = blank(max(1.25 * columns + 1, 4.5), 4.9 * blocks)
    grid = figure.subplots(3 * blocks, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for i, (row, name) in enumerate(zip(rows, classes, strict=True)):
        top = 3 * (i // columns)
        column = [grid[top + k][i % columns] for k in range(3)]
        _sample(column, x[row], x_adv[row], factor, first=i % columns == 0)
        grid[top][i % columns].set_title(_title(result, row, name), fontsize=8)
    return finish(figure, _caption(result, len(rows), factor), path)


def check_images(shape: tuple[int, ...]) -> None:
    """Inputs of this shape can be drawn; else ConfigError."""
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise ConfigError(f"a gallery shows images [n, 1 or 3, height, width]; inputs of shape {shape} are not images")


def _checked(x: Tensor, result: Result) -> Tensor:
    """The adversarial inputs, if they belong to these images."""
    check_images(tuple(x.shape[1:]))
    if result.adversarial is None:
        raise StateError("the result holds no adversarial inputs; evaluate with keep_adversarial=True")
    x_adv = result.adversarial
    if x.shape != x_adv.shape:
        raise ConfigError(f"x has shape {tuple(x.shape)}, the result is about {tuple(x_adv.shape)}; give the same x")
    threat = THREATS[result.threat["norm"]](result.threat["eps"])
    if float(threat.size(x_adv - x.cpu()).max()) > threat.eps + SLACK:
        raise ConfigError(
            f"x and the result's inputs differ by more than {threat.norm} eps {threat.eps:.4g}; "
            "give the x that was evaluated, in the same order"
        )
    return x_adv


def _broken(result: Result, count: int) -> list[int]:
    """A few of the samples that were right without attack and are wrong under one, spread over the set."""
    found = (result.flags["clean"] & ~result.worst).nonzero().squeeze(1)
    if len(found) == 0:
        raise StateError("there is nothing to draw: no attack broke a sample")
    return [int(i) for i in found[torch.linspace(0, len(found) - 1, min(count, len(found))).long()]]


def _classes(result: Result, rows: list[int], names: Sequence[str] | None) -> list[str]:
    """The true class of each sample: the clean prediction, which was right."""
    if result.predictions is None:
        return [""] * len(rows)
    classes = [int(result.predictions[row]) for row in rows]
    if names is None:
        return [str(c) for c in classes]
    if max(classes) >= len(names):
        raise ConfigError(f"there are {len(names)} names for at least {max(classes) + 1} classes; name them all")
    return [names[c] for c in classes]


def _title(result: Result, row: int, name: str) -> str:
    by = next(label for label in order(result) if not result.flags[label][row])
    lines = [name, by.rpartition("/")[2]]
    if "worst" in result.margins:
        lines.insert(1, f"{float(result.margins['clean'][row]):+.2f} to {float(result.margins['worst'][row]):+.2f}")
    return "\n".join(line for line in lines if line)


def _factor(largest: Tensor) -> int:
    """How much larger differences up to this one can be drawn around grey."""
    return next((f for f in FACTORS if f * float(largest) <= 0.5 + SLACK), FACTORS[-1])


def _sample(column: list[Axes], x: Tensor, x_adv: Tensor, factor: int, *, first: bool) -> None:
    difference = 0.5 + factor * (x_adv - x.cpu())
    rows = ("clean", "adversarial", f"difference x{factor}")
    for axes, image, row in zip(column, (x, x_adv, difference), rows, strict=True):
        style: dict[str, Any] = {"cmap": "gray"} if image.shape[0] == 1 else {}
        pixels = image.detach().cpu().float().clamp(0, 1).permute(1, 2, 0).squeeze(2).numpy()
        axes.imshow(pixels, vmin=0, vmax=1, interpolation="nearest", **style)
        axes.set_axis_on()
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color("0.8")  # the border of a difference that is white there
        if first:
            axes.text(-0.08, 0.5, row, transform=axes.transAxes, rotation=90, ha="right", va="center", fontsize=8)


def _caption(result: Result, shown: int, factor: int) -> str:
    broken = int((result.flags["clean"] & ~result.worst).sum())
    return (
        f"{shown} of {broken} broken samples. Above each: true class (the clean prediction too), margin of the true "
        f"class clean to worst, first attack that broke it. Differences are x{factor} around grey. " + caption(result)
    )
