"""Extreme eigenvalues and spectral density of a large symmetric matrix by Lanczos' method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import ConfigError
from flatrock.core.options import count
from flatrock.core.rng import Seed
from flatrock.diagnostics.estimate import real, whole
from flatrock.diagnostics.hessian import Operator
from flatrock.diagnostics.kept import Kept
from flatrock.flatness.full_trace import rademacher


@dataclass(frozen=True)
class Ritz:
    """What m steps of Lanczos say of a matrix, smallest value first.

    `weights[i]` is the squared share of the start vector along the i-th Ritz vector u. `errors[i]` is the error of
    Lanczos' method alone: were products exact, an eigenvalue would lie within the norm of the residual H u - value u.
    It is never less than eps max|value|, but the rounding inside products may be more (see docs/curvature.md).
    """

    values: Tensor
    weights: Tensor
    errors: Tensor

    def to_dict(self) -> dict[str, list[float]]:
        """Plain values."""
        return {"values": self.values.tolist(), "weights": self.weights.tolist(), "errors": self.errors.tolist()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ritz:
        """Inverse of to_dict."""
        return cls(*(torch.tensor(values[name], dtype=torch.float64) for name in ("values", "weights", "errors")))


def lanczos(operator: Operator, start: Tensor, *, steps: int) -> Ritz:
    """T = V^T H V of the Krylov space of `start`, V orthonormal, T tridiagonal.

    Every new vector is made orthogonal to all earlier ones, twice: without this (as in curvlinops, whose Lanczos is
    not used for that reason) rounding brings eigenvalues back that were found before, as copies. Costs the memory of
    `steps` vectors. Ends early where the space is exhausted.
    """
    steps = min(steps, operator.shape[0])
    basis = torch.empty(steps, len(start), dtype=operator.dtype, device=operator.device)
    vector = start.to(basis) / torch.linalg.vector_norm(start)
    diagonal: list[float] = []
    beside: list[float] = []
    for i in range(steps):
        basis[i] = vector
        image = (operator @ vector[:, None])[:, 0]
        diagonal.append(float(torch.dot(image.double(), vector.double())))
        for _ in range(2):
            image -= basis[: i + 1].mT @ (basis[: i + 1] @ image)
        beside.append(float(torch.linalg.vector_norm(image, dtype=torch.float64)))
        size = max(map(abs, diagonal + beside[:-1]))
        if beside[-1] <= 10 * torch.finfo(basis.dtype).eps * size:
            beside[-1] = 0.0
            break
        vector = image / beside[-1]
    return _ritz(diagonal, beside, torch.finfo(basis.dtype).eps)


def _ritz(diagonal: list[float], beside: list[float], rounding: float) -> Ritz:
    edge = torch.tensor(beside[:-1], dtype=torch.float64)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(edge, 1) + torch.diag(edge, -1)
    if not bool(torch.isfinite(matrix).all()):
        raise ConfigError("the Hessian has entries that are not finite; measure with --precision double")
    values, vectors = torch.linalg.eigh(matrix)
    residuals = beside[-1] * vectors[-1].abs()
    return Ritz(values, vectors[0].square(), residuals.clamp_min(rounding * float(values.abs().max())))


@dataclass(frozen=True)
class Spectrum:
    """Largest and smallest eigenvalues, each with Lanczos' own error (see Ritz), and a quadrature of the density.

    For smooth f, mean_i f(eigenvalue_i) is about sum_k weights[k] f(nodes[k]); the weights add up to 1.
    """

    largest: tuple[tuple[float, float], ...]
    smallest: tuple[tuple[float, float], ...]
    nodes: tuple[float, ...]
    weights: tuple[float, ...]
    runs: int
    steps: int

    def density(self, grid: Tensor, *, width: float, bend: float | None = None) -> Tensor:
        """Share of the eigenvalues per unit, every node a Gaussian of this standard deviation.

        With `bend` on the axis asinh(value / bend), on which eigenvalues of every size can be told apart; grid and
        width are then on that axis.
        """
        nodes, weights = (torch.tensor(v, dtype=torch.float64) for v in (self.nodes, self.weights))
        places = nodes if bend is None else torch.asinh(nodes / bend)
        bumps = torch.exp(-0.5 * ((grid.double()[:, None] - places) / width) ** 2)
        return bumps @ weights / (width * math.sqrt(2 * math.pi))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Spectrum:
        """From what dataclasses.asdict made of it; ValueError if its parts do not belong together."""
        largest, smallest = (
            tuple((real(v), real(e, least=0)) for v, e in values[side]) for side in ("largest", "smallest")
        )
        nodes, weights = tuple(map(real, values["nodes"])), tuple(real(w, least=0) for w in values["weights"])
        found = cls(largest, smallest, nodes, weights, whole(values["runs"], least=1), whole(values["steps"], least=1))
        first = nodes[: found.steps]
        ends = [v for v, _ in largest], [v for v, _ in smallest]
        if not largest or not smallest or ends != (list(first[::-1][: len(largest)]), list(first[: len(smallest)])):
            raise ValueError("the extreme eigenvalues are not those of the first Lanczos run")
        if len(nodes) != len(weights) or not math.isclose(math.fsum(weights), 1, rel_tol=1e-6):
            raise ValueError("the weights of the density do not belong to its nodes or do not add up to 1")
        return found


def check_spectrum(*, runs: int, steps: int, top: int) -> None:
    """ConfigError if these options of `spectrum` cannot work together."""
    count("spectrum", "runs", runs, least=1)
    count("spectrum", "top", top, least=1)
    count("spectrum", "steps", steps, least=2)
    if steps < 2 * top:
        raise ConfigError(
            f"spectrum: {steps} Lanczos steps cannot give {top} eigenvalues at each end; use at least {2 * top} steps"
        )


def lanczos_part(run: int) -> str:
    """The name under which a run is kept."""
    return f"lanczos/{run}"


def spectrum(operator: Operator, *, runs: int, steps: int, top: int, seed: Seed, kept: Kept | None = None) -> Spectrum:
    """Stochastic Lanczos quadrature: `runs` of `steps` products each from random signs, averaged.

    The extreme eigenvalues are those of the first run, which would not find the copies of a multiple eigenvalue.
    Each run is a part that is `kept`.
    """
    check_spectrum(runs=runs, steps=steps, top=top)
    like = torch.empty(operator.shape[0], dtype=operator.dtype, device=operator.device)
    keep = kept or Kept()

    def run(i: int) -> Ritz:
        return lanczos(operator, rademacher(like, seed.child(i)), steps=steps)

    found = [keep(lanczos_part(i), partial(run, i), write=Ritz.to_dict, read=Ritz.from_dict) for i in range(runs)]
    ends = list(zip(found[0].values.tolist(), found[0].errors.tolist(), strict=True))
    return Spectrum(
        largest=tuple(ends[::-1][:top]),
        smallest=tuple(ends[:top]),
        nodes=tuple(float(v) for run in found for v in run.values),
        weights=tuple(float(w) / runs for run in found for w in run.weights),
        runs=runs,
        steps=len(found[0].values),
    )
