"""`flatrock bench`: what it measures adds up, and nothing is left behind."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flatrock.cli.main import app
from flatrock.core.costs import Bench, median_interval, read_bench
from flatrock.core.errors import ConfigError
from flatrock.core.hooks import Shift
from flatrock.core.progress import Silent
from flatrock.core.types import Point
from flatrock.engine.loss import Stage
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.workflows import bench as bench_module
from flatrock.workflows.arithmetic import matmul_ceiling
from flatrock.workflows.bench import bench

SMALL = ["train.batch_size=64", "data.limit=200"]


def test_costs_add_up() -> None:
    recipes = [load_recipe("digits_at", [*SMALL, f"attack.steps={steps}"]) for steps in (1, 5, 12)]
    state = torch.random.get_rng_state()
    found = bench(recipes, rounds=3, steps=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [c.recipe for c in found.costs] == 3 * ["digits_at"]
    for c in found.costs:
        assert c.images_per_second == pytest.approx(64_000 / c.ms_per_step)
        assert c.seconds_per_epoch == pytest.approx(4 * c.ms_per_step / 1000), "200 images are 4 batches"
        assert c.share_of_ceiling == pytest.approx(c.tflops / found.ceiling)
        assert c.interval is None, "three rounds hold no interval of 95 %"
        assert c.memory_gib is None
        assert c.kernels_ms == {}, "only a GPU tells"
        assert c.launch_ms is None, "a processor launches nothing to itself"
        assert c.engine == {"precision": "float32", "compile": False, "twin": False}
        assert (c.model, c.batch_size, c.steps_per_epoch, c.objective, c.flatness) == ("digits_cnn", 64, 4, "at", ())
        assert statistics.median(c.rounds_ms) == pytest.approx(c.ms_per_step)
        assert len(c.rounds_ms) == 3
        assert c.over(found.costs[0]).value == pytest.approx(c.ratio)
    assert [c.attack for c in found.costs] == [{"name": "pgd", "steps": n, "bn_mode": "eval"} for n in (1, 5, 12)]
    assert found.costs[0].ratio == 1.0
    assert len({c.recipe_hash for c in found.costs}) == 3
    assert found.costs[2].ratio > found.costs[1].ratio > 1, "more attack steps take time"
    crafting = [c.attack_ms or 0.0 for c in found.costs]
    assert 0 < crafting[0] < crafting[2] < 2 * found.costs[2].ms_per_step
    (plain,) = bench([load_recipe("digits_standard", SMALL)], rounds=1, steps=1).costs
    assert plain.attack_ms is None
    work = [c.tflops * c.ms_per_step for c in found.costs]
    assert work[2] - work[1] == pytest.approx(7 / 4 * (work[1] - work[0]), rel=1e-6), "each attack step is the same"


def test_weights_to_begin_with_need_not_be_there() -> None:
    recipe = load_recipe("digits_at", [*SMALL, "model.weights=gone.pt"])
    given, drawn = bench([recipe, load_recipe("digits_at", SMALL)], rounds=1, steps=1).costs
    assert given.recipe_hash == recipe_hash(recipe) != drawn.recipe_hash, "it is known by what it says all the same"
    assert given.tflops * given.ms_per_step == pytest.approx(drawn.tflops * drawn.ms_per_step, rel=1e-6)


def test_attacks_that_take_turns_are_measured_in_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def craft(stage: Stage, shift: Shift) -> tuple[Point, ...]:
        asked.append(stage.moment.step)
        return bench_craft(stage, shift)

    bench_craft = bench_module.craft
    monkeypatch.setattr(bench_module, "craft", craft)
    (cost,) = bench([load_recipe("digits_gat", SMALL)], rounds=1, steps=4).costs
    assert (cost.attack["name"], cost.objective) == ("guided", "gat")
    assert asked == [asked[0], *range(asked[0], asked[0] + 4)], "the first warms up"


def test_methods_that_wait_for_their_turn_are_measured_at_work() -> None:
    late = {"flatness": [{"name": "awp", "gamma": 0.01, "warmup": 5}], "train.batch_size": 64, "data.limit": 200}
    plain, awp = bench([load_recipe("digits_at", SMALL), load_recipe("digits_at", late)], rounds=1, steps=1).costs
    assert [plain.flatness, awp.flatness[0]["name"], awp.flatness[0]["warmup"]] == [(), "awp", 5]
    assert awp.flatness[0]["steps"] == 1, "options left out of the recipe are told too"
    assert awp.tflops * awp.ms_per_step > 1.05 * plain.tflops * plain.ms_per_step


@pytest.mark.gpu
def test_on_a_gpu_the_first_pays_no_more_than_the_next() -> None:
    """Neither in memory, though compiled passes of one process share theirs, nor in time."""
    fast = [*SMALL, "engine.precision=bfloat16", "engine.compile=true"]
    kept: list[Bench] = []
    recipes = [load_recipe("digits_trades", fast) for _ in range(2)]
    found = bench(recipes, rounds=6, steps=10, device="cuda", keep=kept.append)
    one, two = found.costs
    (early,) = kept
    for first, last in zip(early.costs, found.costs, strict=True):
        assert first == replace(last, memory_gib=None, findings=(*last.findings, "memory not measured: interrupted"))
    assert one.launch_ms is not None
    assert 0 < one.launch_ms < 3 * one.ms_per_step
    assert any("the processor takes" in text for text in one.findings) == (one.launch_ms >= 0.9 * one.ms_per_step)
    assert one.memory_gib is not None
    assert one.memory_gib == pytest.approx(two.memory_gib, rel=0.1)
    assert one.ms_per_step == pytest.approx(two.ms_per_step, rel=0.25), "a small network: the processor sets the pace"
    assert sum(one.kernels_ms.values()) < 1.05 * one.ms_per_step
    assert one.attack_ms is not None
    assert 0 < one.attack_ms < one.ms_per_step


def test_times_survive_where_memory_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = bench([load_recipe("digits_standard", SMALL)], rounds=1, steps=1).costs

    def full(*_: object) -> list[float]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(bench_module, "_memories", full)
    (kept,) = bench_module._with_memory(costs, [], torch.device("cpu"), Silent())
    assert kept == replace(costs[0], findings=("memory not measured: no room",))
    monkeypatch.setattr(bench_module, "_memories", lambda *_: [1.5])
    (whole,) = bench_module._with_memory(costs, [], torch.device("cpu"), Silent())
    assert whole == replace(costs[0], memory_gib=1.5)


@pytest.mark.parametrize(("launching", "told"), [(None, 0), (0.0089, 0), (0.0095, 1), (0.02, 1)])
def test_a_processor_that_sets_the_pace_is_named(launching: float | None, told: int) -> None:
    found = bench_module._pace(0.01, launching)
    assert len(found) == told
    for finding in found:
        assert finding.startswith(f"the processor takes {1000 * (launching or 0):.1f} ms to launch a step of 10.0 ms")


@pytest.mark.parametrize(("count", "low", "high"), [(5, None, None), (6, 0, 5), (8, 0, 7), (9, 1, 7), (15, 3, 11)])
def test_intervals_of_the_median(count: int, low: int | None, high: int | None) -> None:
    """From tables of the sign test."""
    found = median_interval([float(i) for i in range(count)])
    assert found == (None if low is None else (low, high))


def test_arithmetic_of_a_linear_network() -> None:
    """Three products forward; backward those of the weights, and of the inputs of all layers but the first."""
    recipe = load_recipe("moons_standard")
    found = bench([recipe], rounds=1, steps=1).costs[0]
    n = recipe.train.batch_size
    layers = [2 * n * a * b for a, b in ((2, 100), (100, 100), (100, 2))]
    assert found.tflops * found.ms_per_step * 1e9 == pytest.approx(2 * sum(layers) + sum(layers[1:]), rel=1e-6)


def test_arithmetic_of_parts() -> None:
    """Each pass of the loss once more forward; what an attack does is the same."""
    work = []
    for steps in (1, 3):
        words = [*SMALL, f"attack.steps={steps}"]
        recipes = [load_recipe("digits_at", [*words, f"train.micro_batch={most}"]) for most in (64, 16)]
        work.append([c.tflops * c.ms_per_step for c in bench(recipes, rounds=1, steps=1).costs])
    (whole, parts), (more, further) = work
    assert further - parts == pytest.approx(more - whole, rel=1e-6)
    assert 1 < parts / whole < 1.5


@pytest.mark.parametrize("options", [{"rounds": 0}, {"steps": 0}, {"steps": 1.5}, {"rounds": True}], ids=str)
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be a whole number >= 1, got"):
        bench([load_recipe("digits_at")], **options)  # type: ignore[arg-type]


def test_nothing_to_measure() -> None:
    with pytest.raises(ConfigError, match="name at least one recipe"):
        bench([])


def test_the_ceiling_is_a_speed() -> None:
    assert 1e-4 < matmul_ceiling(torch.device("cpu")) < 100


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "bench",
        "digits_at",
        "digits_trades",
        "--rounds",
        "2",
        "--steps",
        "1",
        "--out",
        "b.json",
        "--device",
        "cpu",
    ]
    done = CliRunner().invoke(app, [*words, *(w for key in SMALL for w in ("--set", key))])
    assert done.exit_code == 0, done.output
    assert "digits_trades" in done.output
    assert "matmul ceiling" in done.output
    stored = json.loads(Path("b.json").read_text())
    assert stored["schema"] == "flatrock.bench/2"
    again = read_bench(Path("b.json"))
    assert again is not None
    assert json.loads(json.dumps(again.to_dict())) == stored
    assert [c["recipe"] for c in stored["costs"]] == ["digits_at", "digits_trades"]
    assert stored["provenance"]["rounds"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["b.json"], "nothing but the file asked for"


def test_the_command_writes_over_measurements_only(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"schema": "flatrock.results/1"}')
    done = CliRunner().invoke(app, ["bench", "digits_at", "--out", str(mine), "--device", "cpu"])
    assert done.exit_code == 2
    assert f"{mine} exists and is no file of `flatrock bench`; it is left alone" in done.output
    assert mine.read_text() == '{"schema": "flatrock.results/1"}'


def test_times_beside_others_on_the_gpu_are_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([0, 2])
    monkeypatch.setattr(bench_module, "neighbours", lambda device: next(seen))
    recipe = load_recipe("digits_at", SMALL)
    for cost in bench([recipe, recipe], rounds=1, steps=1).costs:
        (text,) = cost.findings
        assert text.startswith("T11 up to 2 other processes had the same GPU open")
