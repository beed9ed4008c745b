"""How much the loss rises when the weights move the worst way: AWP's and SAM's measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatrock.core.borrow import nudged
from flatrock.core.hooks import Shift
from flatrock.core.options import count, weight
from flatrock.diagnostics.estimate import real, whole
from flatrock.diagnostics.hessian import Operator
from flatrock.diagnostics.probe import fitting
from flatrock.flatness.awp import climb
from flatrock.flatness.sam import ascent
from flatrock.flatness.tensors import chosen

# Steps after the first, as a share of gamma.
STEP = 0.25


class LossSurface:
    """Mean cross-entropy of fixed inputs as a function of the weights, and its gradient; samples go in batches.

    Use it inside `hessian.still(model)`.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int) -> None:
        self.model, self.x, self.y = model, x, y
        self.batch_size = min(batch_size, len(x))

    def value(self) -> float:
        """The loss at the weights as they are."""

        def work(size: int) -> float:
            with torch.no_grad():
                return self._mean([self._sum(x, y) for x, y in self._batches(size)])

        value, self.batch_size = fitting(work, self.batch_size)
        return value

    def slope(self) -> tuple[float, dict[str, Tensor]]:
        """The loss and its gradient w.r.t. every trainable parameter."""
        parameters = chosen(self.model, "all")

        def work(size: int) -> tuple[float, dict[str, Tensor]]:
            sums = []
            slopes = [torch.zeros_like(p) for p in parameters.values()]
            for x, y in self._batches(size):
                loss = self._sum(x, y)
                gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
                torch._foreach_add_(slopes, gradients, alpha=1 / len(self.x))
                sums.append(loss.detach())
            return self._mean(sums), dict(zip(parameters, slopes, strict=True))

        found, self.batch_size = fitting(work, self.batch_size)
        return found

    def _mean(self, sums: Sequence[Tensor]) -> float:
        return float(torch.stack(list(sums)).double().sum()) / len(self.x)

    def _batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(torch.split(self.x, size), torch.split(self.y, size), strict=True)

    def _sum(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y, reduction="sum")


@dataclass(frozen=True)
class AwpRise:
    """The largest rise found within ||v_l|| <= gamma ||w_l||.

    None: the ascent met a loss that is not finite, so nothing is known of the largest. `attacked_anew` is the rise with
    inputs attacked at w + v instead of those of w; None where there is no attack, too.
    """

    gamma: float
    steps: int
    rise: float | None
    attacked_anew: float | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AwpRise:
        """From what dataclasses.asdict made of it."""
        known = (_read(values[name]) for name in ("rise", "attacked_anew"))
        return cls(real(values["gamma"]), whole(values["steps"]), *known)


def awp_rise(
    surface: LossSurface, *, gamma: float, steps: int, attack: Callable[[nn.Module], Tensor] | None = None
) -> AwpRise:
    """max_v L(w + v) - L(w), ||v_l|| <= gamma ||w_l|| for the weight of every convolution and linear layer l.

    Ascent along gradients scaled per layer: the first step is AWP's own shift v_l = gamma ||w_l|| g_l / ||g_l||,
    later ones are gamma / 4 long and projected. `steps` = 1 is the rise that AWP trains against. `attack` makes inputs
    for the moved network.
    """
    weight("curvature", "gamma", gamma)
    count("curvature", "awp_steps", steps, least=1)
    weights = chosen(surface.model, "weights")
    start, slope = surface.slope()
    shift: Shift = {}
    best, worst = start, shift
    for turn in range(steps if gamma else 0):
        shift = climb(weights, shift, slope, step_size=gamma if turn == 0 else STEP * gamma, gamma=gamma)
        with nudged(surface.model, shift):
            value, slope = surface.slope()
        if not math.isfinite(value):  # NaN > best is False: it would pass for no rise at all
            return AwpRise(gamma, steps, None)
        if value > best:
            best, worst = value, shift
    anew = None
    if attack is not None:
        with nudged(surface.model, worst):
            moved = LossSurface(surface.model, attack(surface.model), surface.y, batch_size=surface.batch_size)
            anew = _finite(moved.value() - start)
    return AwpRise(gamma, steps, _finite(best - start), anew)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _read(value: object) -> float | None:
    return None if value is None else real(value)


@dataclass(frozen=True)
class SamRise:
    """L(w + v) - L(w) for v = rho g / ||g||, and what slope and curvature at w say it is.

    predicted = rho ||g|| + rho^2 / 2 (g^T H g) / ||g||^2. Where the two differ, rho is too long for a second-order
    expansion, or kinks (ReLU), which a Hessian does not see, bend the loss. None: not finite.
    """

    rho: float
    rise: float | None
    predicted: float | None
    slope: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamRise:
        """From what dataclasses.asdict made of it."""
        return cls(real(values["rho"]), _read(values["rise"]), _read(values["predicted"]), real(values["slope"]))


def sam_rise(surface: LossSurface, hessian: Operator, *, rho: float) -> SamRise:
    """SAM's one step of length rho over all trainable parameters; `hessian` is of the same loss and parameters."""
    weight("curvature", "rho", rho)
    start, slope = surface.slope()
    flat = torch.cat([g.flatten() for g in slope.values()])
    length = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    if length == 0:
        return SamRise(rho, 0.0, 0.0, 0.0)
    along = flat / length
    bend = float(torch.dot((hessian @ along[:, None])[:, 0].double(), along.double()))
    with nudged(surface.model, ascent(slope, rho=rho) if rho else {}):
        value = surface.value()
    return SamRise(rho, _finite(value - start), _finite(rho * length + rho * rho / 2 * bend), length)


def squared_norm(parameters: Mapping[str, Tensor]) -> float:
    """||w||^2, summed in float64."""
    return math.fsum(float(p.detach().double().square().sum()) for p in parameters.values())
