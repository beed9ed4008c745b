"""What each attack took away and what it cost, as a table and as bars that fall from clean to robust accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flatrock.core.errors import StateError
from flatrock.core.options import choose
from flatrock.core.records import Result
from flatrock.reports.style import COLOURS, blank, finish, radius
from flatrock.reports.table import Table, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLEAN, TOTAL = "clean", "total"
BLUE, RED, GREEN = COLOURS[:3]
# Forward and backward passes are per image; the words are short so that all columns fit into 80 letters.
HEADER = ("attack", "tried", "broken", "acc %", "lost", "s", "fwd", "bwd", "time %")


@dataclass(frozen=True)
class Fall:
    """One attack: the accuracy before and after it (per sample, over all attacks so far) and what it cost."""

    name: str
    before: float
    after: float
    cost: Mapping[str, float] = field(default_factory=dict)


def order(result: Result) -> tuple[str, ...]:
    """Names of the attacks, those of a plan together and as they ran (a JSON file keeps no other order)."""
    together = {label: labels for labels in result.plans.values() for label in labels}
    names = (name for label in result.flags if label != CLEAN for name in together.get(label, (label,)))
    return tuple(dict.fromkeys(names))


def falls(result: Result, plan: str | None = None) -> list[Fall]:
    """The attacks of a plan, or all of them, in the order they ran.

    An attack outside a plan sees every sample that is right without attack. Here only what no earlier attack had broken
    counts as taken away by it, so that the losses add up to clean minus robust accuracy.
    """
    if plan is not None:
        choose("waterfall", "plan", plan, result.plans)
    labels = order(result) if plan is None else result.plans[plan]
    if not labels:
        raise StateError("there is nothing to draw: the result has no attack")
    standing = result.flags[CLEAN]
    found = []
    for label in labels:
        left = standing & result.flags[label]
        before, after = (float(flag.double().mean()) for flag in (standing, left))
        found.append(Fall(label.removeprefix(f"{plan}/"), before, after, result.costs.get(label, {})))
        standing = left
    return found


def waterfall(result: Result, plan: str | None = None) -> Table:
    """One row per attack of a plan (of all attacks): what it broke, the accuracy left after it, its price.

    Accuracies are per sample over all attacks so far, in percent, what an attack took away in points; passes are per
    image it was tried on. The last row adds up: images attacked at all, broken by anything, passes per such image.
    """
    steps = falls(result, plan)
    seconds = sum(s.cost.get("seconds", 0.0) for s in steps)
    rows = [_row(s.name, s, s.cost, seconds) for s in steps]
    whole = Fall(TOTAL, steps[0].before, steps[-1].after)
    attacked, right = round(whole.before * result.n), round(whole.after * result.n)
    cost: dict[str, float] = {"samples": attacked, "broken": attacked - right}
    for name in ("seconds", "forwards", "backwards"):
        if all(name in s.cost for s in steps):
            cost[name] = sum(s.cost[name] for s in steps)
    clean = (CLEAN, "", "", percent(whole.before), *[""] * (len(HEADER) - 4))
    return Table(HEADER, (clean, *rows, _row(TOTAL, whole, cost, seconds)))


def _row(name: str, fall: Fall, cost: Mapping[str, float], all_seconds: float) -> tuple[str, ...]:
    """The cells of an attack; a cost that was not recorded leaves its cell empty."""
    attacked = cost.get("samples")
    passes = [cost.get(n) for n in ("forwards", "backwards")]
    seconds = cost.get("seconds")
    return (
        name,
        "" if attacked is None else f"{attacked:.0f}",
        f"{cost['broken']:.0f}" if "broken" in cost else "",
        percent(fall.after),
        percent(fall.before - fall.after),
        "" if seconds is None else f"{seconds:.1f}",
        *("" if p is None or not attacked else f"{p / attacked:.1f}" for p in passes),
        "" if seconds is None or not all_seconds else f"{100 * seconds / all_seconds:.0f}",
    )


def draw_waterfall(result: Result, path: Path, *, plan: str | None = None) -> Path:
    """The same as bars: clean accuracy, what each attack took away of it in how many seconds, and what is left."""
    steps = falls(result, plan)
    figure = blank(max(6.0, 1.35 * (len(steps) + 2) + 1), 4.2)
    axes = figure.subplots()
    _bars(axes, steps)
    _dress(axes, steps)
    what = "points of accuracy each attack took away, and its time"
    axes.set_title(f"{plan}: {what}" if plan else what, fontsize=10, loc="left")
    return finish(figure, caption(result), path)


def caption(result: Result) -> str:
    """What a reader must know to compare: samples, threat, precision, seed, device, and the doubts there are."""
    about = result.provenance
    codes = sorted({finding.code for finding in result.findings})
    told = [
        str(about["data"]) if "data" in about else f"n = {result.n}",
        f"{result.threat['norm']} eps {radius(result.threat['eps'])}",
        f"attacks in {about['precision']}, verdict in full precision" if "precision" in about else "",
        f"seed {about['seed']}" if "seed" in about else "",
        str(about.get("device", "")),
        f"findings {', '.join(codes)}" if codes else "",
    ]
    return "; ".join(part for part in told if part)


def _bars(axes: Axes, steps: list[Fall]) -> None:
    ends = [(CLEAN, 0.0, steps[0].before, BLUE), ("left", 0.0, steps[-1].after, GREEN)]
    drops = [(s.name, s.after, s.before, RED) for s in steps]
    for i, (_, low, high, colour) in enumerate([ends[0], *drops, ends[1]]):
        if high > low:  # its edge keeps a loss of a single sample visible
            height = 100 * (high - low)
            axes.bar(i, height, bottom=100 * low, width=0.62, color=colour, edgecolor=colour, linewidth=1.2, zorder=2)
    for i, step in enumerate(steps):
        axes.plot([i - 0.31, i + 1.31], [100 * step.before] * 2, color="0.55", linewidth=0.8, zorder=1)
        lost = 100 * (step.before - step.after)
        text = f"-{lost:.2f}" if lost else "0"
        if "seconds" in step.cost:
            text += f"\n{_duration(step.cost['seconds'])}"
        axes.annotate(text, (i + 1, 100 * step.before), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    last = len(steps)
    axes.plot([last - 0.31, last + 1.31], [100 * steps[-1].after] * 2, color="0.55", linewidth=0.8, zorder=1)
    for i, value in ((0, steps[0].before), (last + 1, steps[-1].after)):
        axes.annotate(
            f"{100 * value:.2f}", (i, 100 * value), (0, 3), textcoords="offset points", ha="center", fontsize=9
        )


def _duration(seconds: float) -> str:
    """Three digits: 0.123 s, 12.3 s, 4.2 min, 1.5 h."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def _dress(axes: Axes, steps: list[Fall]) -> None:
    names = ["clean", *(s.name.replace("/", "/\n").replace(":", "\n:") for s in steps), "robust"]
    axes.set_xticks(range(len(names)), names, fontsize=9)
    axes.set_ylabel("accuracy, percent of all samples", fontsize=9)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylim(0, min(112.0, max(10.0, 100 * steps[0].before * 1.14)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.5, zorder=0)
