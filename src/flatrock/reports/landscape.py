"""Weight landscapes side by side: a table of how flat they are, and their curves at one scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatrock.core.errors import ConfigError
from flatrock.core.provenance import devices, origin
from flatrock.diagnostics.surface import Array, Landscape, nearest_radius
from flatrock.reports.style import blank, dress, finish, legend, line_style, radius
from flatrock.reports.table import Table, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the loss axis: the means fill this share of it, single directions may leave it.
ROOM = 1.15
STAR = "* chosen on the test set"


def check_alike(records: Sequence[Landscape]) -> None:
    """Landscapes that can share a picture and its caption: the same question about the same data; else ConfigError."""
    if not records:
        raise ConfigError("there is no landscape to draw")
    first = _question(records[0])
    for other in map(_question, records[1:]):
        for name, mine in first.items():
            if mine != other[name]:
                raise ConfigError(
                    f"landscapes of different {name} are not drawn at one scale: "
                    f"{_short(mine)} and {_short(other[name])}; measure them alike"
                )


def _question(record: Landscape) -> dict[str, Any]:
    """All that a caption says once for every landscape beside it."""
    about = record.provenance
    return {
        "kind": record.kind,
        "axis": tuple(float(f"{a:.12g}") for a in record.axis),
        "threat": dict(record.threat),
        "attack": dict(record.attack),
        "data": about.get("data"),
        "images": [sample["id"] for sample in record.samples],
        "samples (digest)": record.identity.get("data"),
        "directions": None if record.kind == "input" else record.count,
        "seed": about.get("seed"),
        "precision": about.get("precision"),
    }


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} points to {value[-1]:g}"
    return str(value)


def labels(records: Sequence[Landscape]) -> list[str]:
    """A short name for each: its run or model, and its checkpoint or weights where that alone does not tell."""
    runs, marks = zip(*(origin(r.provenance) for r in records), strict=True)
    if len(set(runs)) == len(runs):
        names = list(runs)
    elif len(set(runs)) == 1 and all(marks) and len(set(marks)) == len(marks):
        names = list(marks)
    else:
        names = [f"{run} {mark}".rstrip() for run, mark in zip(runs, marks, strict=True)]
    starred = (name + ("*" if r.marks else "") for name, r in zip(names, records, strict=True))
    seen: dict[str, int] = {}
    unique = []
    for name in starred:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique


def spread(values: Array, digits: int = 3) -> str:
    """mean ± standard deviation over directions; of a single one the value alone."""
    if not np.isfinite(values).all():
        return "not finite"
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.{digits}f}"


def flatness_table(records: Sequence[Landscape], at: float = 0.5) -> Table:
    """One row per landscape: how high the middle lies and how much the loss rises around it.

    For curves `rise` is (rho(-r) + rho(r)) / 2 - rho(0) at the measured radius r nearest to `at`, and `mean rise` the
    mean of rho - rho(0) over the whole grid; for surfaces the mean of |g - g(0, 0)|. Mean ± standard deviation over
    directions (or images).
    """
    check_alike(records)
    first = records[0]
    at = nearest_radius(first.axis, at)
    head = ["landscape", "epoch", "loss"]
    curves = first.kind == "weight-1d"
    if first.kind != "input":
        head += ["robust %" if first.attack else "clean %"]
    head += [f"rise at {at:g}", f"mean rise to {first.axis[-1]:g}"] if curves else ["mean |rise|"]
    rows = []
    for name, record in zip(labels(records), records, strict=True):
        row = [name, str(record.provenance.get("epoch", "")), spread(_middles(record))]
        if record.kind != "input":
            row.append(percent(float(_centre(record, "accuracy"))))
        row += [spread(record.rise_at(at))] if curves else []
        rows.append((*row, spread(record.sharpness)))
    return Table(tuple(head), tuple(rows))


def _middles(record: Landscape) -> Array:
    """The loss in the middle: one number for weights, one per image for inputs."""
    half = len(record.axis) // 2
    return record.loss[:, half, half] if record.kind == "input" else np.array([record.middle])


def _centre(record: Landscape, name: str) -> float:
    """A value at the weights themselves."""
    array = record.values[name][0]
    half = len(record.axis) // 2
    return float(array[half] if array.ndim == 1 else array[half, half])


def paired(records: Sequence[Landscape], at: float = 0.5) -> list[str]:
    """How much more the loss of each landscape rises than that of the first, direction by direction.

    At the measured radius nearest to `at`, as in the table.
    Directions of one number come from the same random numbers if the networks have the same layers by the same names,
    so that their difference has less spread than each of them. Of others there is only the reason why not.
    """
    check_alike(records)
    names = labels(records)
    first = records[0]
    at = nearest_radius(first.axis, at)
    told = []
    for name, record in zip(names[1:], records[1:], strict=True):
        if record.kind != "weight-1d" or record.count < 2:
            continue
        if why := _unpaired(first, record):
            told.append(f"{name} minus {names[0]}: not compared direction by direction, {why}")
            continue
        difference = record.rise_at(at) - first.rise_at(at)
        lower = int((difference < 0).sum())
        told.append(
            f"{name} minus {names[0]}: rise at {at:g} {spread(difference)}, lower along {lower} of {record.count} "
            "directions"
        )
    return told


def _unpaired(first: Landscape, other: Landscape) -> str:
    """Why directions of the same number are not the same for both; nothing if they are, or no record tells."""
    both = [dict(record.moved) for record in (first, other)]
    if not all("digest" in moved for moved in both):  # an older record knows numbers, but no names
        for moved in both:
            moved.pop("digest", None)
    return "" if both[0] == both[1] else "their layers or the names of those differ, and so their directions do"


def caption(records: Sequence[Landscape]) -> str:
    """What a reader must know to compare."""
    first = records[0]
    about = first.provenance
    attack = first.attack.get("name", "")
    what = {
        "weight-1d": f"{first.count} filter-normalised directions, {len(first.axis)} points each",
        "weight-2d": f"{len(first.axis)} x {len(first.axis)} points over two filter-normalised directions",
        "input": f"{len(first.axis)} x {len(first.axis)} points per image, not clipped to [0, 1]",
    }[first.kind]
    told = [
        str(about.get("data", "")),
        f"{first.threat['norm']} eps {radius(first.threat['eps'])}",
        f"{attack} anew at every point in {about.get('precision')}, loss in float32" if attack else "",
        what,
        f"seed {about.get('seed')}",
        _seeds(records),
        STAR if any(r.marks for r in records) else "",
        devices(r.provenance for r in records),
    ]
    return "; ".join(part for part in told if part)


def _seeds(records: Sequence[Landscape]) -> str:
    """What runs were trained with; nothing is known of models that are none."""
    seeds = dict.fromkeys(str(r.provenance.get("train_seed")) for r in records if "model" not in r.provenance)
    return f"trained with seed {', '.join(seeds)}" if seeds else ""


def draw_curves(records: Sequence[Landscape], path: Path, *, at: float = 0.5) -> Path:
    """Loss along every direction (thin) and their mean (thick), its rise near the middle, and the accuracy."""
    check_alike(records)
    first = records[0]
    at = max(at, min((a for a in first.axis if a > 0), default=at))  # so that there is a point to see
    figure = blank(12.5, 4.1)
    loss, near, accuracy = figure.subplots(1, 3)
    for i, (name, record) in enumerate(zip(labels(records), records, strict=True)):
        style = line_style(i)
        _family(loss, record.axis, record.loss, name, style)
        _family(near, record.axis, record.rise, "", style)
        _family(accuracy, record.axis, 100 * record.values["accuracy"], "", style)
    kind = "adversarial" if first.attack else "clean"
    step = "step along the direction, in filter norms"
    dress(loss, f"{kind} loss", step, "cross-entropy, nats")
    dress(near, f"its rise above the middle, to {at:g}", step, "loss minus loss at 0, nats")
    dress(accuracy, "robust accuracy" if first.attack else "clean accuracy", step, "percent")
    loss.set_ylim(0, ROOM * highest([r.loss.mean(0) for r in records]) or 1.0)
    inside = [abs(a) <= at * (1 + 1e-9) for a in first.axis]
    near.set_xlim(-at, at)
    means = [r.rise[:, inside].mean(0) for r in records]
    near.set_ylim(-highest([-mean for mean in means]) - 0.02, ROOM * highest(means) + 0.02)
    accuracy.set_ylim(-1, 101)
    legend(loss, title="mean over directions")
    return finish(figure, caption(records), path)


def highest(arrays: Sequence[Array]) -> float:
    """The largest finite value above 0; 0 if there is none."""
    return max(float(np.max(array, initial=0.0, where=np.isfinite(array))) for array in arrays)


def _family(axes: Axes, x: Sequence[float], rows: Array, label: str, style: dict[str, Any]) -> None:
    """Every direction, and their mean."""
    if len(rows) > 1:
        for row in rows:
            axes.plot(x, row, linewidth=0.6, alpha=0.3, zorder=2, **style)
    axes.plot(x, rows.mean(0), linewidth=1.8, zorder=3, label=label or None, **style)
