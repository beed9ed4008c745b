"""The page of speed targets: files of `flatrock bench` and the targets in, Markdown out. No number is typed by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flatrock.core.costs import Bench, Estimate, StepCost
from flatrock.core.files import json_text
from flatrock.reports.speed_found import found, told
from flatrock.reports.speed_published import published_parts
from flatrock.reports.speed_targets import MEASURES, Limit, SpeedTargets
from flatrock.reports.table import Table, markdown

NOT_MEASURED = "not measured"
OPENING = """\
# Speed targets

Written by `flatrock report-speed results/*.json --out docs/speed_targets.md`; no number on this page is typed by hand.
Ours come from the files `flatrock bench` writes, the others from `results/speed_targets.yaml`."""

WORDS = """\
Behind a time stands the interval that holds its median over the rounds with 95 %; memory is one number: what a recipe,
alone on the GPU, holds while it trains, without what choosing kernels takes once in its first steps and what libraries
keep for themselves. A ratio is only taken between recipes trained in turn in one process; its base is the same recipe
without flatness methods. **yes**: neither the number nor its interval exceeds the target. **open**: the number does
not, but its interval does, or there were too few rounds for one. **no**: the number does. Of two files that measure the
same the newer counts."""

HOW = """\
```sh
flatrock bench cifar10_short_trades cifar10_short_trades_rat2 --out results/bench_trades.json
flatrock bench cifar10_trades_linf_wrn34 cifar10_trades_rat{1,2}_linf_wrn34 --out results/bench_rat.json  # RAT Table 6
flatrock report-speed results/*.json --out docs/speed_targets.md
```"""


def speed_page(targets: SpeedTargets, benches: Mapping[str, Bench]) -> str:
    """The whole page; benches by the name of their file."""
    files = newest_first(benches)
    parts = [OPENING, f"{' '.join(targets.source.split())} {_terms(targets)}", WORDS]
    parts.append(markdown(target_table(targets, files)))
    parts += published_parts(targets, files)
    for name, bench, costs in shown(targets, files):
        parts += [f"## `{name}`", origin(bench), markdown(cost_table(bench, costs))]
        if any(c.kernels_ms for c in costs):
            parts += ["Where the time of a step goes, in milliseconds:", markdown(profile_table(costs))]
        findings = [f"- `{c.recipe}`: {finding}" for c in costs for finding in c.findings]
        parts += ["\n".join(findings)] if findings else []
    parts += ["## Adding a measurement", HOW]
    return "\n\n".join(parts) + "\n"


def newest_first(benches: Mapping[str, Bench]) -> dict[str, Bench]:
    """Files by the time they were measured at."""
    return dict(sorted(benches.items(), key=lambda item: (item[1].provenance["time"], item[0]), reverse=True))


def target_table(targets: SpeedTargets, files: Mapping[str, Bench]) -> Table:
    """One line per row and measure, or several where several recipes were measured."""
    lines = []
    for row in targets.rows:
        for measure, limit in row.limits.items():
            asked = (limit.authors, limit.prototype, limit.target)
            head = (row.label, MEASURES[measure], *("" if n is None else f"{n:g}" for n in asked))
            here = found(targets, row, measure, files)
            lines += [
                (*head, told(one.ours), verdict(limit, measure, one.ours), f"`{one.cost.recipe}`, `{one.file}`")
                for one in here
            ]
            if not here:
                lines.append((*head, NOT_MEASURED, "" if limit.target is None else NOT_MEASURED, ""))
    header = (
        "what",
        "measure",
        "authors' code",
        "prototype",
        "target, at most",
        "ours (95 %)",
        "met?",
        "measured with",
    )
    return Table(header, tuple(lines))


def verdict(limit: Limit, measure: str, ours: Estimate) -> str:
    """Whether it is met; never rounded, and never of a time whose interval reaches above the target."""
    if limit.target is None:
        return ""
    if ours.value > limit.target:
        return f"no, {100 * (ours.value / limit.target - 1):.2g} % over"
    if measure in ("gigabytes", "memory_ratio"):
        return "yes"
    return "yes" if ours.interval is not None and ours.interval[1] <= limit.target else "open"


def shown(targets: SpeedTargets, files: Mapping[str, Bench]) -> Iterator[tuple[str, Bench, list[StepCost]]]:
    """Of every file what counts for a row, as a base too, and what no newer file measures."""
    rows = [one for row in targets.rows for m in row.limits for one in found(targets, row, m, files)]
    newer: set[str] = set()
    for name, bench in files.items():
        used = [one.cost for one in rows if one.file == name]
        used += [base for cost in used if (base := bench.base(cost))]
        if costs := [c for c in bench.costs if c in used or _key(bench, c) not in newer]:
            yield name, bench, costs
        newer |= {_key(bench, c) for c in bench.costs}


def _key(bench: Bench, cost: StepCost) -> str:
    """What was measured."""
    what: Sequence[Any] = (cost.model, cost.batch_size, cost.objective, cost.attack, cost.flatness)
    return json_text([bench.provenance["device"], *what])


def cost_table(bench: Bench, costs: Sequence[StepCost]) -> Table:
    """What `flatrock bench` measured, and the time each flatness method adds."""
    lines = []
    for c in costs:
        base = bench.base(c)
        lines.append(
            (
                f"`{c.recipe}`",
                told(c.step),
                f"{c.seconds_per_epoch:.2f} ({c.steps_per_epoch} steps)",
                f"{c.images_per_second:,.0f}",
                f"{c.tflops:.3g}",
                f"{100 * c.share_of_ceiling:.1f} %",
                "" if c.memory_gib is None else f"{c.memory_gib:.2f}",
                "" if base is None else f"{told(c.over(base))} x `{base.recipe}`",
                _engine(c.engine),
            )
        )
    header = ("recipe", "ms/step (95 %)", "s/epoch of the recipe", "images/s", "TFLOP/s", "of matmul ceiling")
    return Table((*header, "memory, GiB", "time over base (95 %)", "engine"), tuple(lines))


def profile_table(costs: Sequence[StepCost]) -> Table:
    """Milliseconds of a step by kind of kernel, and those in which the GPU waits.

    Beside them crafting alone, and where it was measured, how long the processor takes to launch the step.
    """
    kinds = list(dict.fromkeys(kind for c in costs for kind in c.kernels_ms))
    launched = any(c.launch_ms is not None for c in costs)
    lines = []
    for c in costs:
        spent = [c.kernels_ms.get(kind, 0.0) for kind in kinds]
        waits = max(c.ms_per_step - sum(spent), 0.0)
        crafting = "" if c.attack_ms is None else f"{c.attack_ms:.2f}"
        told = [f"{ms:.2f}" for ms in (c.ms_per_step, *spent, waits)] if c.kernels_ms else [""] * (len(kinds) + 2)
        launching = ("" if c.launch_ms is None else f"{c.launch_ms:.2f}",) if launched else ()
        lines.append((f"`{c.recipe}`", *told, crafting, *launching))
    header = ("recipe", "step", *kinds, "waiting", "of the step, the attack")
    return Table((*header, "processor, launching it") if launched else header, tuple(lines))


def origin(bench: Bench) -> str:
    """Where the numbers come from."""
    about = bench.provenance
    return (
        f"{about['device']}, torch {about['torch']}, commit {about['commit']}, {about['time']}, "
        f"{about['rounds']} rounds of {about['steps']} steps; matmul ceiling {bench.ceiling:.3g} TFLOP/s."
    )


def _engine(engine: Mapping[str, Any]) -> str:
    """Its choices: values that are words, names of those that are on."""
    return ", ".join(str(value) if isinstance(value, str) else key for key, value in engine.items() if value)


def _terms(targets: SpeedTargets) -> str:
    return (
        f"One {targets.device}, batches of {targets.batch_size}, PGD-{targets.attack_steps} on a network in "
        f"{targets.bn_mode} mode; s/epoch are those of {targets.epoch_steps} whole training steps, data and "
        f"augmentation included."
    )
