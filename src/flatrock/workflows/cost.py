"""What a recipe will cost, before it is paid: parameters, steps, network passes, arithmetic, a time from one probe."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flatrock.attacks.catalog import parse_attack
from flatrock.core.errors import ConfigError, ModelError
from flatrock.core.rng import Seed
from flatrock.core.team import Team
from flatrock.core.types import PathAttack
from flatrock.data.catalog import info
from flatrock.engine.runner import Runner
from flatrock.models.classifier import Classifier
from flatrock.objectives.catalog import OBJECTIVES
from flatrock.recipes.build import build_engine, build_flatness, check_training
from flatrock.recipes.optimizer import build_optimizer, trial_model
from flatrock.recipes.pieces import build_attack, build_model, rows_at_once
from flatrock.recipes.schema import Recipe

# A pass is timed again and again: other processes only ever make it slower, so the best counts; how much slower all of
# them were together tells how busy the machine is.
PROBE_SECONDS, PROBE_PASSES = 0.5, 3
PROBE_FLOPS = 2e10  # of one timed pass on a CPU, a second or less; a larger batch is cut down to that
# Costs in forward passes: gradients of inputs and weights take about twice the forward, of inputs alone about once.
ATTACK_PASS, TRAINING_PASS = 2.0, 3.0


@dataclass(frozen=True)
class Cost:
    """An estimate; `seconds` extrapolates the best of `passes` timed ones of a batch, as if the device were idle.

    An order of magnitude. While the machine is as busy as it was then, training takes `slowdown` times as long.
    """

    parameters: int
    samples: int | None
    steps_per_epoch: int | None
    steps: int | None
    forwards_per_step: int
    total_flops: float | None
    seconds: float | None
    passes: int = 0
    slowdown: float = 1.0


def estimate(recipe: Recipe, *, device: torch.device, samples: int | None = None, devices: int = 1) -> Cost:
    """Estimate the cost of a recipe; the data need not be there. `samples` to train on, if only their files know.

    `devices` of the kind of `device` share every batch; what they send to each other is not counted.
    """
    samples = samples or known_samples(recipe)
    model = build_model(recipe).to(device).eval()
    team = Team(0, devices)
    rows = rows_at_once(recipe, team)
    again = int(rows < team.rows(recipe.train.batch_size))  # passes of a loss that goes in parts are made twice
    _check_training(model, rows)
    attack = build_attack(recipe)
    inner = 0 if attack is None else attack.passes(model.num_classes)
    outer, asked = _outer(recipe, inner), _helped(recipe)
    parameters = sum(p.numel() for p in model.parameters())
    if samples is None:
        return Cost(parameters, None, None, None, inner + (1 + again) * outer, None, None)
    full, rest = divmod(samples, recipe.train.batch_size)
    per_epoch = full + (rest >= 2 * devices or (rest > 0 and recipe.data.extra is not None))  # as the loader counts
    steps = recipe.train.steps(per_epoch)
    epochs = steps / per_epoch
    trained = epochs * samples * (inner * ATTACK_PASS + outer * (TRAINING_PASS + again) + asked)
    probed = _probes(recipe, model, samples, epochs)
    flops = _flops_per_image(model, device)
    turns = _turns(trained, probed, device, devices)
    size, times = _timed(recipe, model, device, rows=rows, steps=steps, flops=flops)
    return Cost(
        parameters=parameters,
        samples=samples,
        steps_per_epoch=per_epoch,
        steps=steps,
        forwards_per_step=inner + (1 + again) * outer,
        total_flops=(trained + probed) * flops,
        seconds=turns * min(times) / size / ATTACK_PASS,
        passes=len(times),
        slowdown=fmean(times) / min(times),
    )


def _turns(trained: float, probed: float, device: torch.device, devices: int) -> float:
    """Passes that are made one after the other: GPUs share training, not probes; processes on CPUs share the cores."""
    return trained / (devices if device.type == "cuda" else 1) + probed


def _check_training(model: Classifier, rows: int) -> None:
    """Two rows, enough for BatchNorm and quick anywhere; if they are refused a whole batch, as training asks for."""
    try:
        check_training(model, rows=min(rows, 2))
    except ModelError:
        check_training(model, rows=rows)


def _outer(recipe: Recipe, inner: int) -> int:
    """Forward passes with gradients of the weights in one step, flatness methods and inner loops included."""
    objective = OBJECTIVES.make(recipe.objective.name, **recipe.objective.options)
    methods = build_flatness(recipe).values()
    needed = {name for m in methods for name in m.needs} - set(objective.passes)
    points = _points(recipe)
    once = points * len(objective.passes)
    optimizer = build_optimizer(recipe.optimizer, trial_model(recipe.optimizer), Seed(0))
    loops = int(getattr(optimizer, "inner_loops", 1))
    return (once + points * len(needed)) * loops + sum(m.passes(once, inner) for m in methods)


def _helped(recipe: Recipe) -> int:
    """Forward passes of a helper per step, without gradients, counted as if it were the network that is trained."""
    objective = OBJECTIVES.make(recipe.objective.name, **recipe.objective.options)
    return _points(recipe) if "helper" in objective.passes else 0


def _points(recipe: Recipe) -> int:
    """Adversarial inputs of one sample that a step trains on."""
    attack = build_attack(recipe)
    return attack.points if isinstance(attack, PathAttack) else 1


def known_samples(recipe: Recipe) -> int | None:
    """Samples trained on in an epoch; None if only the files know. ConfigError if they are too few."""
    data = recipe.data
    known = info(data.name).train_size
    if known is None:
        return None
    size = data.options.get("points", known)
    if not isinstance(size, int) or isinstance(size, bool):
        raise ConfigError(f"data.points must be a whole number, got {size!r}")
    left = min(size - data.held_out, data.limit or size)
    if left < recipe.train.batch_size:
        raise ConfigError(
            f"of {size} samples of {data.name!r}, data.held_out={data.held_out} and data.limit={data.limit} leave "
            f"{max(left, 0)} to train on, fewer than one batch of train.batch_size={recipe.train.batch_size}"
        )
    return left


def _probes(recipe: Recipe, model: Classifier, samples: int, epochs: float) -> float:
    """Forward passes of single images to choose the best epoch: the selection data and as many training samples.

    At most: samples that are broken early leave. A test set, whose size is not known here, is taken as a fifth.
    """
    size = samples // 5 if recipe.select.data == "test" else recipe.data.held_out
    passes = parse_attack(recipe.select.attack)[1].passes(model.num_classes)
    return epochs / recipe.select.every * 2 * min(size, recipe.select.size or size) * passes * ATTACK_PASS


def _flops_per_image(model: Classifier, device: torch.device) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.rand(1, *model.input_shape, device=device))
    return float(counter.get_total_flops())


def _timed(
    recipe: Recipe, model: Classifier, device: torch.device, *, rows: int, steps: int, flops: float
) -> tuple[int, list[float]]:
    """How many images, and how long forward and input-backward passes of them took, as attacks in training make them.

    One before them has warmed up.
    """
    affordable = int(PROBE_FLOPS / max(ATTACK_PASS * flops, 1))
    n = rows if device.type == "cuda" else min(rows, max(affordable, 2))
    x = torch.rand(n, *model.input_shape, device=device)
    runner = Runner(model, build_engine(recipe, device, steps=steps))
    with runner.tuned(), runner.attacked(recipe.attack.bn_mode, {}) as queried:
        _timed_pass(queried, x)
        times = [_timed_pass(queried, x)]
        while len(times) < PROBE_PASSES or sum(times) < PROBE_SECONDS:
            times.append(_timed_pass(queried, x))
    return n, times


def _timed_pass(queried: nn.Module, x: torch.Tensor) -> float:
    begun = time.perf_counter()
    leaf = x.clone().requires_grad_(True)
    torch.autograd.grad(queried(leaf).sum(), leaf)[0].sum().item()  # .item() waits for a GPU
    return time.perf_counter() - begun
