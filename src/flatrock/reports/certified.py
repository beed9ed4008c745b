"""Certified accuracy over the radius, as a table and as a curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flatrock.core.errors import StateError
from flatrock.diagnostics.certificate import Certificate
from flatrock.reports.style import COLOURS, blank, dress, finish, legend, line_style, mark_of
from flatrock.reports.table import Table, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def certified_table(certificate: Certificate, radii: Sequence[float] = ()) -> Table:
    """One row per L2 radius: the Linf eps inside its ball, and the share of samples certified right that far.

    Radii are multiples of sigma / 2 and those wanted. A `*` marks a checkpoint that was selected on the test set.
    """
    star = "*" if certificate.marks else ""
    rows = []
    for radius in sorted({*certificate.grid(), *radii}):
        share = certificate.certified(radius)
        eps = 255 * certificate.linf_of(radius)
        count = round(share * certificate.samples)
        rows.append((f"{radius:.4g}", f"{eps:.2f}/255", percent(share) + star, str(count)))
    return Table(("L2 radius", "as Linf eps", "certified %", "samples"), tuple(rows))


def draw_certified(
    certificates: Mapping[str, Certificate],
    path: Path,
    *,
    radii: Sequence[float] = (),
    attacked: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Path:
    """Certified accuracy of each certificate against the L2 radius, Linf eps above; `attacked` adds measured points.

    `radii` that are wanted get a thin line. Points of `attacked` are (radius, accuracy as a fraction).
    """
    if not certificates:
        raise StateError("there is nothing to draw: no certificate was given")
    figure = blank(7.2, 4.6)
    axes = figure.subplots()
    end = max(c.smoothing.largest_radius for c in certificates.values())
    for i, (name, certificate) in enumerate(certificates.items()):
        _curve(axes, certificate, name, i)
    for i, (name, points) in enumerate((attacked or {}).items()):
        colour = COLOURS[(len(certificates) + i) % len(COLOURS)]
        x, y = zip(*points, strict=True)
        shares = [100 * share for share in y]
        axes.plot(x, shares, color=colour, linestyle=":", linewidth=1, marker=mark_of(i), markersize=4, label=name)
        end = max(end, *x)
    for radius in radii:
        axes.axvline(radius, color="0.6", linewidth=0.8, zorder=0)
    first = next(iter(certificates.values()))
    dress(axes, "certified accuracy", "L2 radius, pixel units of [0, 1]", "percent of all samples")
    axes.set_ylim(0, 102)
    axes.set_xlim(0, 1.04 * end)
    if len({c.dimension for c in certificates.values()}) == 1:
        scale = 255 * first.linf_of(1.0)
        above = axes.secondary_xaxis("top", functions=(partial(np.multiply, scale), partial(np.multiply, 1 / scale)))
        above.set_xlabel(f"Linf eps inside that ball ({first.dimension} dimensions), /255", fontsize=9)
        above.tick_params(labelsize=8)
        above.spines["top"].set_visible(False)
    legend(axes)
    return finish(figure, caption(certificates), path)


def _curve(axes: Axes, certificate: Certificate, name: str, i: int) -> None:
    """A step at every radius that is proved; the tick on the axis is the most that n votes could prove."""
    ends = sorted({0.0, *certificate.radii[certificate.right].tolist()})
    shares = [100 * certificate.certified(r) for r in ends]
    style = line_style(i)
    axes.step(ends, shares, where="post", label=name, linewidth=1.6, **style)
    axes.plot(certificate.smoothing.largest_radius, 0, "|", color=style["color"], markersize=9, clip_on=False)


def caption(certificates: Mapping[str, Certificate]) -> str:
    """What a reader must know to compare: data, noise, votes, error probability, seed, device; once if alike."""
    told = {name: _facts(certificate) for name, certificate in certificates.items()}
    if len(set(told.values())) == 1:
        return next(iter(told.values()))
    return ". ".join(f"{name}: {facts}" for name, facts in told.items())


def _facts(certificate: Certificate) -> str:
    s, about = certificate.smoothing, certificate.provenance
    told = [
        str(about.get("data", f"{certificate.samples} samples")),
        f"sigma {s.sigma:g}, n0 {s.n0}, n {s.n}, alpha {s.alpha:g}",
        f"tick: largest radius {s.largest_radius:.3f}",
        f"seed {about['seed']}" if "seed" in about else "",
        str(about.get("device", "")),
        "checkpoint selected on the test set" if certificate.marks else "",
    ]
    return "; ".join(part for part in told if part)
