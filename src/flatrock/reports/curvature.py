"""Curvature of runs side by side: tables, spectral densities, and layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flatrock.core.errors import ConfigError
from flatrock.core.provenance import devices, origin
from flatrock.diagnostics.curvature import Curvature
from flatrock.diagnostics.curvature_record import ADVERSARIAL, CurvatureRecord
from flatrock.diagnostics.estimate import Estimate, within
from flatrock.reports.style import COLOURS, blank, dress, finish, legend, line_style, mark_of, radius
from flatrock.reports.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The axis of a density is asinh(value / bend): linear up to bend, 1 / 50 of the largest eigenvalue, then logarithmic.
STRAIGHT = 50
# Width of the Gaussian every node of the density is drawn as, on that axis.
WIDTH = 0.12
POINTS = 1500
SHORT = {ADVERSARIAL: "adv."}
INCHES_PER_LAYER = 0.32
# What to do about records that differ in something no option of the same name sets.
CURES = {
    "threat": "show runs of one threat at a time",
    "data": "measure all on the same samples (--on, --images)",
    "layers": "measure all with --layers, or all with --no-layers",
}


def check_alike(records: Sequence[CurvatureRecord]) -> None:
    """Records that can be compared: of the same threat, attack, samples and settings; else ConfigError.

    Samples of one name may differ, by options of the data or by its files; records of older versions do not tell.
    """
    if not records:
        raise ConfigError("there is no curvature to show")
    first = records[0].compared
    for other in (record.compared for record in records[1:]):
        for name in dict.fromkeys([*first, *other]):
            one, two = first.get(name), other.get(name)
            if one != two:
                cure = CURES.get(name, f"measure all with one --{name.replace('_', '-')}")
                raise ConfigError(f"curvatures of different {name} are not compared: {one} and {two}; {cure}")
    digests = [str(digest)[:8] for record in records if (digest := record.provenance.get("data_digest"))]
    if len(set(digests)) > 1:
        raise ConfigError(
            f"curvatures of different samples are not compared: {first['data']}, but with digests "
            f"{', '.join(digests)}; measure all on the same files, with the same options of the data"
        )


def labels(records: Sequence[CurvatureRecord]) -> list[str]:
    """The run or model of each, its weights where one is there several times, a number where that is not enough.

    * = chosen on the test set.
    """
    names, files = zip(*(origin(r.provenance) for r in records), strict=True)
    if len(set(names)) < len(names):
        names = tuple(f"{name} {file}".rstrip() for name, file in zip(names, files, strict=True))
    again = [names[:i].count(name) for i, name in enumerate(names)]
    unique = [f"{name} ({k + 1})" if k else name for name, k in zip(names, again, strict=True)]
    return [name + ("*" if record.marks else "") for name, record in zip(unique, records, strict=True)]


def curvature_table(records: Sequence[CurvatureRecord], loss: str) -> Table:
    """Eigenvalues of the Hessian of one loss: ± is a standard error, of largest and smallest Lanczos' own."""
    rows = []
    for name, record in zip(labels(records), records, strict=True):
        found = record.losses[loss]
        ends = [within(*end[0]) for end in (found.spectrum.largest, found.spectrum.smallest)]
        rows.append((name, f"{found.loss:.4f}", str(found.whole.trace), str(found.whole.spread), *ends))
    return Table(("run", "loss", "sum (trace)", "spread", "largest", "smallest"), tuple(rows))


def sharpness_table(records: Sequence[CurvatureRecord]) -> Table:
    """How much each loss rises at the worst weights nearby, and what slope and curvature say SAM's rise is."""
    rows = []
    for name, loss, found in _each(records):
        # Clean inputs are not attacked.
        anew = _rise(found.awp.attacked_anew) if loss == ADVERSARIAL else ""
        rows.append((name, _rise(found.awp.rise), anew, _rise(found.sam.rise), _rise(found.sam.predicted)))
    return Table(("run, loss", "AWP", "attacked anew", "SAM", "SAM predicted"), tuple(rows))


def _rise(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _each(records: Sequence[CurvatureRecord]) -> Iterator[tuple[str, str, Curvature]]:
    """Of each record and loss: what a row is called, the loss, and what was found."""
    for name, record in zip(labels(records), records, strict=True):
        for loss, found in record.losses.items():
            yield f"{name}, {SHORT.get(loss, loss)}", loss, found


def bound_table(records: Sequence[CurvatureRecord]) -> Table:
    """The terms of TrH's Theorem 3 for each record and loss."""
    rows = []
    for name, _, found in _each(records):
        terms = found.pac_bayes
        log = "" if terms.logarithm is None else f"{terms.logarithm:.4f}"
        best = "" if terms.best is None else f"{terms.best:.3f} at {terms.best_sigma0:.3f}"
        row = (f"{terms.risk:.4f}", f"{terms.weights:.3f}", str(terms.trace), log, f"{terms.total:.3f}", best)
        rows.append((name, *row))
    head = ("run, loss", "risk", "weights", "trace", "log form", "sum", "least at σ0")
    if not any(row[4] for row in rows):  # known only where traces are exact
        return Table(head[:4] + head[5:], tuple(row[:4] + row[5:] for row in rows))
    return Table(head, tuple(rows))


def caption(records: Sequence[CurvatureRecord]) -> str:
    """What a reader must know to compare."""
    first = records[0]
    about, how = first.provenance, first.settings
    every = [found for record in records for found in record.losses.values()]
    ran = every[0].spectrum
    told = [
        f"cross-entropy of {about.get('data')}",
        f"adversarial: {first.attack['name']}, {first.threat['norm']} eps {radius(first.threat['eps'])}, "
        "attacked once and held fixed",
        f"trace {' or '.join(dict.fromkeys(map(_drawn, every)))}",
        f"{ran.runs} Lanczos runs of {ran.steps} steps",
        f"AWP gamma {how['gamma']:g}, {how['awp_steps']} steps",
        f"SAM rho {how['rho']:g}",
        f"PAC-Bayes sigma0 {how['sigma0']:g}, beta {how['beta']:g}",
        f"{about.get('precision')} precision",
        f"seed {about.get('seed')}",
        "* chosen on the test set" if any(r.marks for r in records) else "",
        devices(r.provenance for r in records),
    ]
    return "; ".join(part for part in told if part)


def _drawn(found: Curvature) -> str:
    """How a trace was found, and from how many random vectors."""
    draws = found.whole.trace.draws
    return f"{found.method}, {draws} probes" if draws else "exact"


def draw_spectra(records: Sequence[CurvatureRecord], path: Path) -> Path:
    """Density of the eigenvalues of each record, one panel per loss, all at one scale that shows every size."""
    losses = list(records[0].losses)
    figure = blank(5.4 * len(losses), 3.9)
    panels = figure.subplots(1, len(losses), sharex=True, sharey=True, squeeze=False)[0]
    ends = [n for record in records for found in record.losses.values() for n in found.spectrum.nodes]
    bend = max(map(abs, ends)) / STRAIGHT or 1.0
    low, high = (math.asinh(end / bend) for end in (min(ends), max(ends)))
    grid = torch.linspace(low - 5 * WIDTH, high + 5 * WIDTH, POINTS, dtype=torch.float64)
    highest = 0.0
    for panel, loss in zip(panels, losses, strict=True):
        for i, (name, record) in enumerate(zip(labels(records), records, strict=True)):
            found = record.losses[loss]
            density = found.spectrum.density(grid, width=WIDTH, bend=bend) * found.whole.count
            highest = max(highest, float(density.max()))
            panel.plot((bend * grid.sinh()).tolist(), density.tolist(), label=name, linewidth=1.3, **line_style(i))
        dress(panel, f"{loss} loss", "eigenvalue of the Hessian", "eigenvalues per unit of this axis")
        panel.label_outer()
        panel.set_xscale("asinh", linear_width=bend)
        panel.set_yscale("log")
        panel.set_xticks(_ticks(bend, min(ends), max(ends)), minor=False)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    # One eigenvalue is a bump 0.4 / width high; far below that there are only tails of Gaussians.
    panels[0].set_ylim(0.01 * 0.4 / WIDTH, 4 * highest)
    legend(panels[-1])
    return finish(figure, _short(records), path)


def _ticks(bend: float, low: float, high: float) -> list[float]:
    """0 and 1, 3, 10, 30, ... on both sides, where they are far enough from 0 to have room for a label."""
    first = math.floor(math.log10(bend))
    steps = [m * 10.0**k for k in range(first, first + 4) for m in (1, 3) if m * 10.0**k > 1.5 * bend]
    return [-s for s in reversed(steps) if -s >= low] + [0.0] + [s for s in steps if s <= high]


def draw_layers(records: Sequence[CurvatureRecord], path: Path) -> Path:
    """Sum above, spread below, of the eigenvalues of each layer's block and of the whole; bars are 95 % intervals."""
    losses = list(records[0].losses)
    names = ["whole", *records[0].losses[losses[0]].layers]
    width = max(5.0, 1.4 + INCHES_PER_LAYER * len(names) * max(1.0, 0.35 * len(records)))
    figure = blank(width * len(losses), 6.0)
    panels = figure.subplots(2, len(losses), sharex=True, sharey="row", squeeze=False)
    for column, loss in enumerate(losses):
        for row, what in enumerate(("trace", "spread")):
            _dots(panels[row, column], records, names, loss, what)
        dress(panels[0, column], f"{loss} loss", "", "sum of eigenvalues (trace)" if column == 0 else "")
        dress(panels[1, column], "", "", "standard deviation of eigenvalues" if column == 0 else "")
        panels[1, column].set_xticks(range(len(names)), names, rotation=90 if len(names) > 9 else 0, fontsize=8)
    legend(panels[0, -1])
    return finish(figure, _short(records) + "; bars are 95 % intervals", path)


def same_layers(records: Sequence[CurvatureRecord]) -> bool:
    """Whether all networks have layers of the same names, and so one axis."""
    return len({tuple(found.layers) for record in records for found in record.losses.values()}) == 1


def _dots(panel: Axes, records: Sequence[CurvatureRecord], names: Sequence[str], loss: str, what: str) -> None:
    """One mark per layer and record, beside each other; logarithmic where all are positive."""
    lowest = float("inf")
    for i, (label, record) in enumerate(zip(labels(records), records, strict=True)):
        found = record.losses[loss]
        blocks = [found.whole, *found.layers.values()]
        if ["whole", *found.layers] != list(names):
            raise ConfigError(f"{label} has other layers than {labels(records)[0]}; draw them in figures of their own")
        estimates: list[Estimate] = [getattr(block, what) for block in blocks]
        shift = 0.7 * ((i + 0.5) / len(records) - 0.5)
        lows = [e.value - e.interval()[0] for e in estimates]
        panel.errorbar(
            [k + shift for k in range(len(names))],
            [e.value for e in estimates],
            yerr=lows,
            fmt=mark_of(i),
            color=COLOURS[i % len(COLOURS)],
            markersize=4,
            elinewidth=1,
            label=label,
        )
        lowest = min(lowest, *(e.interval()[0] for e in estimates))
    if lowest > 0:
        panel.set_yscale("log")
    panel.axvline(0.5, color="0.8", linewidth=0.8, zorder=0)


def _short(records: Sequence[CurvatureRecord]) -> str:
    """The part of the caption a figure needs."""
    first = records[0]
    about = first.provenance
    return (
        f"Hessian of the cross-entropy of {about.get('data')}; adversarial: {first.attack['name']}, "
        f"{first.threat['norm']} eps {radius(first.threat['eps'])}, held fixed; {about.get('precision')} precision, "
        f"seed {about.get('seed')}, {devices(r.provenance for r in records)}"
    )
