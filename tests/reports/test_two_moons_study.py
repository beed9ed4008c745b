"""The two-moons study: what it stored is consistent, what its page says follows from it, and it can be drawn again."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from flatrock.diagnostics.estimate import Estimate
from flatrock.diagnostics.moments import Moments, known_moments

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("two_moons", ROOT / "examples" / "two_moons.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / "two_moons.json").read_text())
    return found


def test_estimates_agree_with_the_exact_values(study: ModuleType, stored: dict[str, Any]) -> None:
    for run in stored["runs"].values():
        assert run["epochs"] == list(range(101))
        for i, epoch in enumerate(run["exact"]["epochs"]):
            for layer in study.LAYERS:
                for what in study.LABELS:
                    assert run[layer][what][epoch] == pytest.approx(run["exact"][layer][what][i], rel=0.016)


def test_traces_of_layers_add_up(study: ModuleType, stored: dict[str, Any]) -> None:
    layers = [name for name in study.LAYERS if name != "whole"]
    for run in stored["runs"].values():
        for epoch, whole in enumerate(run["whole"]["sum"]):
            assert sum(run[layer]["sum"][epoch] for layer in layers) == pytest.approx(whole, rel=1e-9)


def test_the_page_says_what_was_found(stored: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "two_moons.md").read_text()
    seeds = stored["seeds"]
    for name in ("no trace", "top layer"):
        values = seeds[name]["sum"]
        assert f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" in page
        assert f"{stored['runs'][name]['exact']['whole']['sum'][-1]:.2f}" in page
    ratio = [a / b for a, b in zip(seeds["top layer"]["sum"], seeds["no trace"]["sum"], strict=True)]
    assert max(ratio) < 1
    assert ", ".join(f"{r:.2f}" for r in ratio) in page
    assert stored["provenance"]["commit"] in page


def test_it_is_drawn_from_moments(study: ModuleType, tmp_path: Path) -> None:
    def moments(trace: float) -> dict[str, Moments]:
        whole = Moments(9, Estimate(trace, 0.1, 8), Estimate(9.0, 0.2, 8), Estimate(0.9, 0.01, 8))
        return {"whole": whole, **{name: known_moments(3, trace / 3, 4.0) for name in ("fc1", "fc2", "head")}}

    rows = study.table(range(101), [moments(1 + e / 50) for e in range(101)])
    assert rows["whole"]["sum_error"][3] == 0.1
    assert rows["fc2"]["std"][0] == known_moments(3, 1 / 3, 4.0).spread.value
    exact = study.table(study.EXACT, [moments(1 + e / 50) for e in study.EXACT])
    study.draw({name: {**rows, "exact": exact} for name in study.RECIPES}, tmp_path / "x.png", "a caption")
    with Image.open(tmp_path / "x.png") as image:
        assert image.size == (1950, 900)
