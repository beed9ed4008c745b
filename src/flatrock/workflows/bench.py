"""What training costs on this machine: recipes side by side in one process, step by step in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flatrock.core.costs import Bench, StepCost, median
from flatrock.core.device import free_memory
from flatrock.core.errors import ConfigError
from flatrock.core.hooks import Flatness
from flatrock.core.neighbours import neighbours, told
from flatrock.core.options import count
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import birth_certificate
from flatrock.core.rng import kept_global_rng, seed_layers
from flatrock.data.loader import Batch
from flatrock.engine.craft import craft
from flatrock.engine.follow import set_lr
from flatrock.engine.job import Job
from flatrock.engine.loss import Stage
from flatrock.engine.runner import Runner
from flatrock.engine.step import mixed, train_step
from flatrock.recipes.build import build_job
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.schema import Recipe
from flatrock.workflows.arithmetic import Arithmetic, matmul_ceiling
from flatrock.workflows.clock import between, now, wait
from flatrock.workflows.kernels import kernel_ms

# Steps before anything is timed: compiling, recording, choosing kernels.
WARM_UP = 12
# Where launching a step takes this share of it, a moment of hesitation makes the GPU wait.
BUSY = 0.9


@dataclass
class _Contestant:
    """A recipe in training, how much arithmetic its step takes, and the times measured."""

    job: Job
    batches: Iterator[Batch]
    flops: float = 0.0
    step: int = 0
    times: list[float] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)
    attack_ms: float | None = None
    kernels_ms: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[str, ...] = ()

    def profile(self, steps: int) -> None:
        """See where the time goes; a profiler that fails must not cost what was measured before."""
        try:
            self.kernels_ms = kernel_ms(partial(self.run, steps), steps=steps)
        except RuntimeError as error:
            self.findings = (f"not profiled: {error}",)

    def run(self, steps: int) -> None:
        """Train so many steps, batches and augmentation included."""
        for _ in range(steps):
            seed_layers(self.job.seed.child("layers", self.step), self.job.device)
            set_lr(self.job, self.step)
            train_step(self.job, next(self.batches), step=self.step, guard=False)
            self.step += 1


def bench(
    recipes: Sequence[Recipe],
    *,
    rounds: int = 15,
    steps: int = 10,
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    keep: Callable[[Bench], object] | None = None,
) -> Bench:
    """Time whole training steps of these recipes in turn, `rounds` times `steps` of each; the first is the base.

    Nothing is probed, saved or kept. Machines drift: only what was measured in one call should be compared. `keep` is
    given the times as soon as they are there, before memory is measured.
    """
    if not recipes:
        raise ConfigError("there is nothing to measure: name at least one recipe")
    count("bench", "rounds", rounds, least=1)
    count("bench", "steps", steps, least=1)
    where, listener = torch.device(device), progress or Silent()
    with TemporaryDirectory() as folder, kept_global_rng(where):
        ceiling = matmul_ceiling(where)
        make = partial(_contestant, folder=Path(folder), data_folder=data_folder, device=where)
        listener.begin("warming up", len(recipes))
        found = []
        for recipe in recipes:
            found.append(make(recipe))
            listener.advance(1, recipe.name)
        listener.end()
        listener.begin("measuring", rounds * len(found))
        beside = _measure(found, rounds, steps, listener)
        listener.end()
        for one in found:
            one.attack_ms = _attack_ms(one, steps)
        for one in found if where.type == "cuda" else ():  # last: a profiler slows down what comes after it
            one.profile(steps)
        costs = tuple(_cost(one, found[0], ceiling, beside=beside) for one in found)
        del one, found
        about = birth_certificate(device=where, seed=recipes[0].seed, rounds=rounds, steps=steps)
        if where.type == "cuda":
            if keep is not None:
                keep(Bench(tuple(_noted(cost, "memory not measured: interrupted") for cost in costs), ceiling, about))
            costs = _with_memory(costs, [partial(make, recipe) for recipe in recipes], where, listener)
    return Bench(costs, ceiling, about)


def _measure(found: Sequence[_Contestant], rounds: int, steps: int, progress: Progress) -> str:
    """Seconds per step of each in every round, and in words who else had the GPU open.

    As within an epoch a GPU has its next step in hand when it ends one, so the first step of a turn is not counted. It
    gets no more in advance, and nothing of the others: what the processor takes too long to launch must show. How long
    it takes is seen in the first step, whose launches wait for nothing.
    """
    device = found[0].job.device
    others = [neighbours(device)]
    for turn in range(rounds):
        for one in [*found[turn % len(found) :], *found[: turn % len(found)]]:
            wait(device)
            asked = time.perf_counter()
            one.run(1)
            one.launches.append(time.perf_counter() - asked)
            begun = now(device)
            one.run(steps)
            ended = now(device)
            wait(device)
            one.times.append(between(begun, ended) / steps)
            progress.advance(1)
    return told([*others, neighbours(device)])


def _contestant(recipe: Recipe, *, folder: Path, data_folder: Path | None, device: torch.device) -> _Contestant:
    # Weights it would begin with need not be there: drawn ones of the same network cost the same.
    drawn = recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": None})})
    job = build_job(drawn, folder=folder / recipe.name, data_folder=data_folder, device=device)
    job = replace(job, recipe_hash=recipe_hash(recipe))
    job.model.train()
    # In the last epoch: what waits for its turn, such as AWP after a warm-up, has begun.
    one = _Contestant(job, _forever(job), step=(job.epochs - 1) * len(job.loader))
    one.run(WARM_UP)
    one.flops = _flops(one)
    return one


def _with_memory(
    costs: tuple[StepCost, ...],
    makers: Sequence[Callable[[], _Contestant]],
    device: torch.device,
    progress: Progress,
) -> tuple[StepCost, ...]:
    """The costs with what `_memories` finds; where that fails, what was measured before must not be lost."""
    try:
        taken = _memories(makers, device, progress)
    except RuntimeError as error:  # out of memory, above all
        return tuple(_noted(cost, f"memory not measured: {error}") for cost in costs)
    return tuple(replace(cost, memory_gib=gib) for cost, gib in zip(costs, taken, strict=True))


def _noted(cost: StepCost, finding: str) -> StepCost:
    return replace(cost, findings=(*cost.findings, finding))


def _memories(makers: Sequence[Callable[[], _Contestant]], device: torch.device, progress: Progress) -> list[float]:
    """GiB of the GPU each recipe holds while it trains and nothing else does; compiled passes share memory if they can.

    Asked when all have been trained once: kernels are chosen and libraries have what they keep, or whoever comes first
    would pay for that.
    """
    progress.begin("each alone, for its memory", len(makers))
    taken = []
    before = free_memory(device)
    for make in makers:
        one = make()
        free_memory(device, compiled=True)
        one.run(2)
        wait(device)
        taken.append((torch.cuda.max_memory_reserved(device) - before) / 2**30)
        progress.advance(1, one.job.name)
        del one
        free_memory(device)
    progress.end()
    return taken


def _forever(job: Job) -> Iterator[Batch]:
    """Full batches of one epoch after the other."""
    epoch = 0
    while True:
        full = 0
        for batch in job.loader.epoch(epoch):
            full = max(full, len(batch.ids))
            if len(batch.ids) == full:
                yield batch
        epoch += 1


def _attack_ms(one: _Contestant, times: int) -> float | None:
    """Milliseconds of crafting one batch at the weights of now, without what methods add to it."""
    if one.job.attack is None:
        return None
    batch = next(one.batches)
    x, y = mixed(one.job, batch, one.step)
    # Step after step: an attack may take turns.
    stages = [Stage(one.job, x, y, batch.ids, one.job.moment(one.step + i)) for i in range(times)]
    with one.job.runner.tuned():
        craft(stages[0], {})
        begun = now(one.job.device)
        for stage in stages:
            craft(stage, {})
        ended = now(one.job.device)
        wait(one.job.device)
    return 1000 * between(begun, ended) / times


def _flops(one: _Contestant) -> float:
    """Multiplications and additions of a step in convolutions and matrix products, counted on the plain engine."""
    helper = None if one.job.helper is None else one.job.helper.plain()
    plain = replace(one.job, runner=Runner(one.job.model, most=one.job.runner.most), helper=helper)
    with Arithmetic() as counter:
        train_step(plain, next(one.batches), step=one.step, guard=False)
    return float(counter.flops)


def _cost(one: _Contestant, base: _Contestant, ceiling: float, *, beside: str) -> StepCost:
    job, recipe = one.job, one.job.recipe
    known = dict(job.findings)
    if beside:
        known["T11"] = f"{beside}: no time here need be that of a GPU of one's own"
    seconds = statistics.median(one.times)
    launching = statistics.median(one.launches) if job.device.type == "cuda" else None
    tflops = one.flops / seconds / 1e12
    ratio = median([a / b for a, b in zip(one.times, base.times, strict=True)])
    return StepCost(
        recipe=job.name,
        model=recipe["model"]["name"],
        batch_size=recipe["train"]["batch_size"],
        steps_per_epoch=len(job.loader),
        objective=recipe["objective"]["name"],
        flatness=tuple({"name": name, **_options(method)} for name, method in job.flatness.items()),
        attack={"name": recipe["attack"]["name"], "steps": getattr(job.attack, "steps", None), "bn_mode": job.bn_mode},
        ms_per_step=1000 * seconds,
        images_per_second=recipe["train"]["batch_size"] / seconds,
        seconds_per_epoch=seconds * len(job.loader),
        tflops=tflops,
        share_of_ceiling=tflops / ceiling,
        memory_gib=None,
        attack_ms=one.attack_ms,
        kernels_ms=one.kernels_ms,
        ratio=ratio.value,
        interval=ratio.interval,
        rounds_ms=tuple(1000 * t for t in one.times),
        recipe_hash=job.recipe_hash,
        engine=asdict(job.runner.engine),
        launch_ms=None if launching is None else 1000 * launching,
        findings=(*(f"{code} {why}" for code, why in known.items()), *one.findings, *_pace(seconds, launching)),
    )


def _pace(step: float, launching: float | None) -> tuple[str, ...]:
    """Whether the processor, not the GPU, may decide how long a step takes; both in seconds."""
    if launching is None or launching < BUSY * step:
        return ()
    told = f"the processor takes {1000 * launching:.1f} ms to launch a step of {1000 * step:.1f} ms"
    return (f"{told}: it may set the pace, and a faster or less busy one make the step shorter",)


def _options(method: Flatness) -> dict[str, Any]:
    """What it was made with, defaults included, without the state it keeps."""
    return {f.name: getattr(method, f.name) for f in fields(method) if f.init} if is_dataclass(method) else {}
