"""Records of `flatrock bench`: read as written, compared only within a file, refused when damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_cases import DRIFT, fake_bench, fake_cost, store

from flatrock.core.costs import Estimate, median, read_bench
from flatrock.core.errors import StateError


def test_a_file_is_read_as_written(tmp_path: Path) -> None:
    bench = fake_bench(
        fake_cost("cifar10_short_at", 15.0, interval=(0.9, 1.1)),
        fake_cost("cifar10_short_at_awp", 18.0, gib=None, launch_ms=4.5, findings=("T01 no compiler",)),
    )
    assert read_bench(store(tmp_path / "b.json", bench)) == bench


def test_files_of_before_launches_were_timed_are_read(tmp_path: Path) -> None:
    raw = json.loads(json.dumps(fake_bench(fake_cost("cifar10_short_at", 15.0, launch_ms=4.5)).to_dict()))
    assert raw["costs"][0].pop("launch_ms") == 4.5
    file = tmp_path / "b.json"
    file.write_text(json.dumps(raw))
    found = read_bench(file)
    assert found is not None
    assert found.costs[0].launch_ms is None


def test_other_files_are_not_taken_for_one(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    for content in ("[]", "{}", '{"schema": "flatrock.results/1", "rows": []}', '{"costs": [], "ceiling": 1}'):
        file.write_text(content)
        assert read_bench(file) is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda raw: raw.update(schema="flatrock.bench/1"), "schema 'flatrock.bench/1', expected 'flatrock.bench/2'"),
        (lambda raw: raw["costs"][0].pop("model"), "model"),
        (lambda raw: raw["costs"][0].update(speed=1), "speed"),
        (lambda raw: raw["costs"][0].update(ms_per_step=1.0), "the rounds of cifar10_short_at do not give its 1.0 ms"),
        (lambda raw: raw["costs"][1]["rounds_ms"].pop(), "the rounds of cifar10_short_at_awp do not give"),
        (lambda raw: raw["costs"][0].update(rounds_ms=[]), "median"),
        (lambda raw: raw["costs"][0].update(kernels_ms=None), "items"),
        (lambda raw: raw["costs"][0].update(kernels_ms={"copies": None}), "NoneType"),
        (lambda raw: raw["costs"][0].update(attack_ms="fast"), "fast"),
        (lambda raw: raw["costs"][0].update(launch_ms="slow"), "slow"),
        (lambda raw: raw["provenance"].pop("time"), "no time in its provenance"),
        (lambda raw: raw.pop("ceiling"), "ceiling"),
    ],
)
def test_damage_is_named(tmp_path: Path, change: Any, fault: str) -> None:
    raw = json.loads(
        json.dumps(fake_bench(fake_cost("cifar10_short_at", 15.0), fake_cost("cifar10_short_at_awp", 18.0)).to_dict())
    )
    change(raw)
    file = tmp_path / "b.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(StateError, match=fault):
        read_bench(file)
    file.write_text("{")
    with pytest.raises(StateError, match="not readable JSON"):
        read_bench(file)
    with pytest.raises(StateError, match="there is no file"):
        read_bench(tmp_path / "gone.json")


def test_rounds_are_paired() -> None:
    """The machine drifts by 20 %, the ratio does not."""
    base = fake_cost("cifar10_short_at", 15.0)
    cost = fake_cost("cifar10_short_at_awp", 18.0)
    ratio = cost.over(base)
    assert ratio.value == pytest.approx(1.2)
    assert ratio.interval == pytest.approx((1.2, 1.2))
    assert cost.step == Estimate(18.0, (18.0 * DRIFT[0], 18.0 * DRIFT[-1]))
    with pytest.raises(ValueError, match="zip"):
        cost.over(fake_cost("cifar10_short_at", 15.0, rounds=(1.0,)))


def test_estimates() -> None:
    assert median([3.0, 1.0, 2.0]) == Estimate(2.0, None)
    assert median([float(i) for i in range(7)]).times(2.0) == Estimate(6.0, (0.0, 12.0))


def test_the_base_is_the_same_without_flatness() -> None:
    at, trades = fake_cost("cifar10_short_at", 15.0), fake_cost("cifar10_short_trades", 18.0)
    plain = fake_cost("cifar10_short_trades", 40.0, engine={"precision": "float32"})
    wide, long = fake_cost("cifar10_trades_linf_wrn34", 90.0), fake_cost("cifar10_short_trades", 36.0, attack__steps=20)
    large = fake_cost("cifar10_short_trades", 36.0, train__batch_size=256)
    rat = fake_cost("cifar10_short_trades_rat2", 19.0)
    others = (at, wide, long, large, fake_cost("cifar10_short_trades_awp", 20.0), rat)
    assert fake_bench(*others, plain, trades).base(rat) is trades
    assert fake_bench(*others, plain).base(rat) is plain, "its engine is on the page"
    assert fake_bench(*others).base(rat) is None
    assert fake_bench(trades, trades).base(trades) is None, "a base has no base"
