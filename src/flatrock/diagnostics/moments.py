"""Sum and spread of the eigenvalues of a large symmetric matrix from products with it, with error bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatrock.core.options import count
from flatrock.core.rng import Seed
from flatrock.diagnostics.estimate import Estimate, dots, mean_of, standard_error
from flatrock.diagnostics.estimate import whole as whole_number
from flatrock.diagnostics.hessian import Operator
from flatrock.diagnostics.kept import Kept
from flatrock.flatness.full_trace import rademacher

# The name under which the moments of the whole network are kept.
WHOLE = "whole"


@dataclass(frozen=True)
class Moments:
    """Of the n eigenvalues of H: their sum tr H, the sum of their squares ||H||_F^2, and their standard deviation.

    spread = sqrt(||H||_F^2 / n - (tr H / n)^2): no eigenvalue needs to be known.
    """

    count: int
    trace: Estimate
    square: Estimate
    spread: Estimate

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Moments:
        """From what dataclasses.asdict made of it; ValueError if the spread is not that of trace and square."""
        known = (Estimate.from_dict(values[name]) for name in ("trace", "square", "spread"))
        found = cls(whole_number(values["count"], least=1), *known)
        spread = _spread(found.count, found.trace.value, found.square.value)
        if not math.isclose(found.spread.value, spread, rel_tol=1e-6, abs_tol=1e-12):
            raise ValueError(f"a spread of {found.spread.value} does not follow from its trace and square ({spread})")
        return found


def known_moments(size: int, trace: float, square: float) -> Moments:
    """Moments that are exact."""
    return Moments(size, Estimate(trace), Estimate(square), Estimate(_spread(size, trace, square)))


def products(size: int, *, probes: int, sketch: int) -> int:
    """How many products with a matrix of this size `moments` makes."""
    return min(size, 2 * sketch + probes)


def moments(operator: Operator, *, probes: int, sketch: int, seed: Seed) -> Moments:
    """Hutch++ (Meyer et al. 2021): exact on the range of H found with `sketch` vectors, estimated on the rest.

    With Q an orthonormal basis of H S (S random signs), P = I - Q Q^T, and g_i random signs,

        tr H      = tr Q^T H Q  + mean_i (P g_i)^T H (P g_i)
        ||H||_F^2 = ||H Q||_F^2 + mean_i ||H P g_i||^2.

    Both means are unbiased for any Q, so their errors are standard errors of the mean over the `probes`. sketch = 0 is
    Hutchinson's estimator. Where as many products would give every column of H, they do, and nothing is estimated.
    """
    count("moments", "probes", probes, least=2)
    count("moments", "sketch", sketch, least=0)
    size = operator.shape[0]
    if size <= 2 * sketch + probes:
        everything = torch.eye(size, dtype=operator.dtype, device=operator.device)
        return known_moments(size, *_inside(operator, everything))
    rest = _signs(operator, probes, seed.child("probe"))
    trace = square = 0.0
    if sketch:
        basis = torch.linalg.qr(operator @ _signs(operator, sketch, seed.child("sketch")))[0]
        rest -= basis @ (basis.mT @ rest)
        trace, square = _inside(operator, basis)
    image = operator @ rest
    return _added(size, trace, square, dots(rest, image), dots(image, image))


def with_trace_of(whole: Moments, blocks: Sequence[Moments]) -> Moments:
    """The moments of a matrix whose trace is that of its diagonal blocks: tr H = sum_l tr H_ll.

    What lies between blocks adds nothing to the trace but, for Hessians of networks, most of the noise of its estimate:
    the same slope bends every pair of layers. Errors of blocks are independent of each other and of the whole.
    """
    draws = max(block.trace.draws for block in blocks)
    trace = Estimate(
        math.fsum(block.trace.value for block in blocks), math.hypot(*(block.trace.error for block in blocks)), draws
    )
    spread = _spread(whole.count, trace.value, whole.square.value)
    tilt = math.hypot(whole.square.error / whole.count, 2 * trace.value * trace.error / whole.count**2)
    error = tilt / (2 * spread) if spread > 0 else 0.0
    return Moments(whole.count, trace, whole.square, Estimate(spread, error, whole.square.draws or draws))


def layer_part(name: str) -> str:
    """The name under which a layer is kept."""
    return f"layer/{name}"


def network_moments(
    hessian: Callable[[Mapping[str, Tensor]], Operator],
    layers: Mapping[str, Mapping[str, Tensor]],
    parameters: Mapping[str, Tensor],
    draws: Mapping[str, int],
    seed: Seed,
    kept: Kept | None = None,
) -> tuple[Moments, dict[str, Moments]]:
    """Estimated moments of the Hessian w.r.t. all parameters and of the diagonal block of every layer.

    `hessian` makes the Hessian w.r.t. some parameters, `draws` are options of `moments`. The trace of the whole is the
    sum over the layers, if there are any. The whole and each layer are parts that are `kept`.
    """
    keep = kept or Kept()

    def measured(members: Mapping[str, Tensor], name: str) -> Moments:
        return moments(hessian(members), **draws, seed=seed.child(name))

    def part(name: str, make: Callable[[], Moments]) -> Moments:
        return keep(name, make, write=asdict, read=Moments.from_dict)

    whole = part(WHOLE, partial(measured, parameters, "whole"))
    found = {name: part(layer_part(name), partial(measured, members, name)) for name, members in layers.items()}
    return with_trace_of(whole, list(found.values())) if found else whole, found


def _signs(operator: Operator, columns: int, seed: Seed) -> Tensor:
    like = torch.empty(operator.shape[0], dtype=operator.dtype, device=operator.device)
    return torch.stack([rademacher(like, seed.child(i)) for i in range(columns)], 1)


def _inside(operator: Operator, basis: Tensor) -> tuple[float, float]:
    """tr Q^T H Q and ||H Q||_F^2."""
    image = operator @ basis
    return float(dots(basis, image).sum()), float(dots(image, image).sum())


def _added(size: int, trace: float, square: float, traces: Tensor, squares: Tensor) -> Moments:
    """What is known of the moments, and independent draws of the rest of each."""
    whole, second = mean_of(traces, above=trace), mean_of(squares, above=square)
    spread = _spread(size, whole.value, second.value)
    # d(spread^2) = d||H||_F^2 / n - 2 (tr H / n) d(tr H) / n, draw by draw: the two are not independent.
    tilt = squares / size - 2 * (whole.value / size) * traces / size
    error = standard_error(tilt) / (2 * spread) if spread > 0 else 0.0
    return Moments(size, whole, second, Estimate(spread, error, len(traces)))


def _spread(size: int, trace: float, square: float) -> float:
    return math.sqrt(max(square / size - (trace / size) * (trace / size), 0.0))
