"""What `estimate` says before training, against what training does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from flatrock.core.errors import ConfigError
from flatrock.core.team import Team
from flatrock.engine.loop import train
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import build_model
from flatrock.workflows import cost
from flatrock.workflows.cost import Cost, estimate

CPU = torch.device("cpu")


def take_seconds(monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> list[tuple[int, ...]]:
    """Every timed pass takes the next of these times; the list records the shapes of the inputs."""
    shapes: list[tuple[int, ...]] = []

    def timed_pass(model: Any, x: torch.Tensor) -> float:
        shapes.append(tuple(x.shape))
        return next(seconds)

    monkeypatch.setattr(cost, "_timed_pass", timed_pass)
    return shapes


def of(name: str, *overrides: str) -> Cost:
    return estimate(load_recipe(name, overrides), device=CPU)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    take_seconds(monkeypatch, repeat(0.2))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("words", "passes"),
    [
        (("digits_standard",), 1),
        (("digits_at", "attack.steps=7"), 7 + 1),
        (("digits_at", "attack={name: pgd}"), 20 + 1),
        (("digits_at", "attack={name: fgsm, bn_mode: eval}"), 1 + 1),
        (("digits_at", "attack={name: mt, steps: 3, bn_mode: eval}"), 1 + 9 * (3 + 1) + 1),
        (("digits_trades", "attack.steps=7"), 1 + 7 + 2),
    ],
)
def test_passes_are_the_attacks_own_and_the_objectives(words: tuple[str, ...], passes: int) -> None:
    assert of(*words).forwards_per_step == passes


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("batch_size", [64, 137, 1097])  # 1097 samples: 9, 1 and 0 beyond whole batches
def test_steps_are_those_of_the_loader(batch_size: int, tmp_path: Path) -> None:
    recipe = load_recipe("digits_at", [f"train.batch_size={batch_size}"])
    job = build_job(recipe, folder=tmp_path / "r")
    found = estimate(recipe, device=CPU)
    assert found.samples == 1097
    assert found.steps_per_epoch == len(job.loader)
    assert found.steps == len(job.loader) * recipe.train.epochs


@pytest.mark.parametrize("batch_size", [64, 137, 273])  # 9, 1 and 5 beyond whole batches, of which 5 are too few for 3
def test_several_devices_share_batches(batch_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = take_seconds(monkeypatch, repeat(0.2))
    recipe = load_recipe("digits_at", [f"train.batch_size={batch_size}"])
    job = build_job(recipe, folder=tmp_path / "r", team=Team(0, 3))
    found = estimate(recipe, device=CPU, devices=3)
    assert found.steps_per_epoch == len(job.loader)
    assert {shape[0] for shape in shapes} == {-(-batch_size // 3)}
    assert found.total_flops == estimate(recipe, device=CPU).total_flops


def test_gpus_share_training_and_the_first_one_probes() -> None:
    assert cost._turns(90.0, 6.0, torch.device("cuda", 0), 3) == 36
    assert cost._turns(90.0, 6.0, CPU, 3) == 96, "there are no more cores than for one process"


@pytest.mark.usefixtures("quick")
def test_limits_cut_the_cost() -> None:
    whole = of("digits_at", "train.batch_size=100", "train.epochs=10", "select.size=1")
    cut = of("digits_at", "train.batch_size=100", "train.epochs=10", "select.size=1", "train.max_steps=11")
    assert (whole.steps, cut.steps) == (110, 11)
    assert whole.seconds is not None
    assert cut.seconds == pytest.approx(whole.seconds / 10)
    assert of("digits_at", "data.limit=512", "train.batch_size=64").steps_per_epoch == 8


def test_seconds_and_arithmetic_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = take_seconds(monkeypatch, repeat(0.2))
    words = ("train.batch_size=100", "train.epochs=4", "attack.steps=5", "select.attack=pgd-3", "select.every=2")
    found = of("digits_at", *words)
    training = 4 * 1097 * (5 * 2 + 3)  # in forward passes of one image; a timed pass is worth two of them
    choosing = 4 / 2 * (200 + 200) * 3 * 2
    assert found.seconds == pytest.approx((training + choosing) * 0.2 / 100 / 2)
    assert set(shapes) == {(100, 1, 8, 8)}


def test_parts_are_timed_and_pass_forward_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = take_seconds(monkeypatch, repeat(0.2))
    words = ("train.batch_size=100", "train.epochs=4", "attack.steps=5", "select.attack=pgd-3", "select.every=2")
    found = of("digits_at", *words, "train.micro_batch=30")
    training = 4 * 1097 * (5 * 2 + 4)
    choosing = 4 / 2 * (200 + 200) * 3 * 2
    assert found.seconds == pytest.approx((training + choosing) * 0.2 / 25 / 2)
    assert set(shapes) == {(25, 1, 8, 8)}, "four parts of a hundred"
    assert found.forwards_per_step == 5 + 2
    three = estimate(load_recipe("digits_at", [*words, "train.micro_batch=30"]), device=CPU, devices=3)
    assert shapes[-1] == (17, 1, 8, 8), "two parts of the 34 that one of three devices has"
    assert three.forwards_per_step == 5 + 2


@pytest.mark.usefixtures("quick")
def test_arithmetic_of_linear_layers() -> None:
    words = ["data.points=1000", "data.held_out=200", "train.epochs=4", "attack.steps=5", "select.attack=pgd-3"]
    recipe = load_recipe("moons_at", [*words, "train.batch_size=100", "select.every=2"])
    layers = [m for m in build_model(recipe).modules() if isinstance(m, torch.nn.Linear)]
    image = sum(2 * m.in_features * m.out_features for m in layers)  # a multiplication and an addition per weight
    forwards = 4 * 800 * (5 * 2 + 3) + 4 / 2 * (200 + 200) * 3 * 2
    assert estimate(recipe, device=CPU).total_flops == pytest.approx(forwards * image)


def test_cold_calls_and_hiccups_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    take_seconds(monkeypatch, repeat(0.2))
    steady = of("digits_at")
    take_seconds(monkeypatch, chain([30.0, 0.3], cycle([0.4, 0.2])))
    assert of("digits_at").seconds == steady.seconds


def test_the_mean_of_all_passes_tells_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    take_seconds(monkeypatch, repeat(0.125))
    assert of("digits_at").slowdown == 1, "an idle machine"
    take_seconds(monkeypatch, chain([30.0], [0.125, 1.0, 0.125, 0.25]))  # the first one warms up
    found = of("digits_at", "train.epochs=1")
    assert (found.passes, found.slowdown) == (3, pytest.approx((0.125 + 1.0 + 0.125) / 3 / 0.125))


def test_timing_goes_on_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = take_seconds(monkeypatch, repeat(0.01))
    of("digits_at")
    assert len(shapes) == 1 + 50
    shapes = take_seconds(monkeypatch, repeat(3.0))
    of("digits_at")
    assert len(shapes) == 1 + 3


def test_large_networks_are_timed_on_small_batches_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = take_seconds(monkeypatch, repeat(0.2))
    found = of("cifar10_at_linf")
    assert {s[0] for s in shapes} <= set(range(2, 64))
    assert found.seconds is not None
    assert found.seconds > 86400


def test_size_only_the_files_know() -> None:
    found = of("digits_at", "data={name: folder, channels: 1}", "model.num_classes=10")
    assert (found.samples, found.steps, found.seconds, found.total_flops) == (None, None, None, None)
    assert found.parameters == 24_058


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"held_out": 2000}, "data.held_out=2000 and data.limit=None leave 0 to train on"),
        ({"held_out": 200, "limit": 4}, "data.limit=4 leave 4 to train on, fewer than one batch of train.batch_size="),
    ],
)
def test_nothing_to_train_on(changes: dict[str, int], text: str) -> None:
    recipe = load_recipe("digits_at")
    starved = recipe.model_copy(update={"data": recipe.data.model_copy(update=changes)})
    with pytest.raises(ConfigError, match=text):
        estimate(starved, device=CPU)


@pytest.mark.parametrize("points", ["abc", "1.5"])
def test_points_must_be_a_whole_number(points: str) -> None:
    with pytest.raises(ConfigError, match="points"):
        of("moons_at", f"data.points={points}")


@pytest.mark.slow
def test_time_is_right_within_a_factor_of_three(tmp_path: Path) -> None:
    recipe = load_recipe("digits_at", ["train.epochs=5"])
    expected = estimate(recipe, device=CPU).seconds
    job = build_job(recipe, folder=tmp_path / "r")
    begun = time.perf_counter()
    train(job)
    spent = time.perf_counter() - begun
    assert expected is not None
    assert spent / 3 < expected < 3 * spent


def test_the_pass_that_is_timed_is_the_one_attacks_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the recipe's precision and BatchNorm mode, without gradients of the weights."""
    seen = []

    def timed_pass(queried: torch.nn.Module, x: torch.Tensor) -> float:
        model = queried._runner[0].model  # type: ignore[union-attr, index]
        seen.append((model.training, any(p.requires_grad for p in model.parameters()), queried(x).dtype))
        return 1.0

    monkeypatch.setattr(cost, "_timed_pass", timed_pass)
    of("digits_at", "engine.precision=bfloat16", "attack.bn_mode=train")
    of("digits_at", "engine.precision=bfloat16", "attack.bn_mode=eval")
    assert set(seen) == {(True, False, torch.float32), (False, False, torch.float32)}


@pytest.mark.gpu
def test_on_a_gpu_the_time_is_that_of_its_fast_passes() -> None:
    recipes = [load_recipe("cifar10_short_at", words) for words in ([], ["engine.precision=float32"])]
    fast, plain = (estimate(recipe, device=torch.device("cuda")).seconds for recipe in recipes)
    assert fast is not None and plain is not None
    assert fast < plain / 2
