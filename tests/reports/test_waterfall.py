"""What each attack took away and cost: the numbers add up, in plans and outside, and are drawn without global state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.records import Finding, Result
from flatrock.core.threat import Linf
from flatrock.evaluation.evaluate import evaluate
from flatrock.reports.waterfall import caption, draw_waterfall, falls, order, waterfall


def flag(*right: int) -> Tensor:
    return torch.tensor(right).bool()


def cost(samples: int, broken: int, seconds: float, forwards: int, backwards: int) -> dict[str, float]:
    names = ("samples", "broken", "seconds", "forwards", "backwards")
    return dict(zip(names, map(float, (samples, broken, seconds, forwards, backwards)), strict=True))


@pytest.fixture
def result() -> Result:
    """Ten samples, eight right; pgd breaks three of them, the plan two, then one of those pgd broke too."""
    return Result(
        {"norm": "linf", "eps": 8 / 255},
        {
            "clean": flag(1, 1, 1, 1, 1, 1, 1, 1, 0, 0),
            "pgd-20": flag(0, 0, 0, 1, 1, 1, 1, 1, 0, 0),
            "auto/zeta": flag(1, 1, 0, 0, 1, 1, 1, 1, 0, 0),
            "auto/alpha": flag(1, 0, 0, 0, 1, 1, 1, 1, 0, 0),
        },
        plans={"auto": ("auto/zeta", "auto/alpha")},
        costs={
            "pgd-20": cost(8, 3, 3.0, 88, 80),
            "auto/zeta": cost(8, 2, 1.0, 40, 36),
            "auto/alpha": cost(6, 1, 6.0, 600, 0),
        },
        provenance={"seed": 3, "device": "a device", "precision": "float16, fused"},
    )


HEADER = ("attack", "tried", "broken", "acc %", "lost", "s", "fwd", "bwd", "time %")


def test_a_plan(result: Result) -> None:
    table = waterfall(result, "auto")
    assert table.header == HEADER
    assert table.rows == (
        ("clean", "", "", "80.00", "", "", "", "", ""),
        ("zeta", "8", "2", "60.00", "20.00", "1.0", "5.0", "4.5", "14"),
        ("alpha", "6", "1", "50.00", "10.00", "6.0", "100.0", "0.0", "86"),
        ("total", "8", "3", "50.00", "30.00", "7.0", "80.0", "4.5", "100"),
    )


def test_all_attacks_one_after_the_other(result: Result) -> None:
    """An attack that sees every sample counts here only for those no earlier one had broken."""
    table = waterfall(result)
    assert table.rows == (
        ("clean", "", "", "80.00", "", "", "", "", ""),
        ("pgd-20", "8", "3", "50.00", "30.00", "3.0", "11.0", "10.0", "30"),
        ("auto/zeta", "8", "2", "40.00", "10.00", "1.0", "5.0", "4.5", "10"),
        ("auto/alpha", "6", "1", "40.00", "0.00", "6.0", "100.0", "0.0", "60"),
        ("total", "8", "4", "40.00", "40.00", "10.0", "91.0", "14.5", "100"),
    )
    assert result.robust == 0.4


def test_the_order_of_a_plan_survives_a_file(result: Result) -> None:
    """JSON sorts its keys; the plan remembers that zeta came before alpha."""
    scrambled = replace(result, flags={k: result.flags[k] for k in sorted(result.flags)})
    assert order(scrambled) == ("auto/zeta", "auto/alpha", "pgd-20")
    assert waterfall(scrambled, "auto") == waterfall(result, "auto")
    assert [f.name for f in falls(scrambled)] == ["auto/zeta", "auto/alpha", "pgd-20"]


def test_losses_add_up_to_clean_minus_robust(digits: Any, digits_model: nn.Module) -> None:
    x, y = digits.test_x[:60], digits.test_y[:60]
    found = evaluate(digits_model, x, y, Linf(0.15), attacks=["fgsm", "pgd-5", "cw-5"])
    table = waterfall(found)
    steps = falls(found)
    assert [row[0] for row in table.rows] == ["clean", "fgsm", "pgd-5", "cw-5", "total"]
    assert sum(s.before - s.after for s in steps) == pytest.approx(found.clean - found.robust)
    assert (steps[0].before, steps[-1].after) == (found.clean, found.robust)
    assert found.robust < found.clean
    assert table.rows[2][6:8] == tuple(
        f"{found.costs['pgd-5'][k] / found.costs['pgd-5']['samples']:.1f}" for k in ("forwards", "backwards")
    )


def test_costs_that_were_not_recorded_leave_empty_cells(result: Result) -> None:
    table = waterfall(replace(result, costs={"auto/zeta": {"seconds": 1.0}}), "auto")
    assert table.rows[1] == ("zeta", "", "", "60.00", "20.00", "1.0", "", "", "100")
    assert table.rows[2] == ("alpha", "", "", "50.00", "10.00", "", "", "", "")
    assert table.rows[3] == ("total", "8", "3", "50.00", "30.00", "", "", "", "")


def test_nothing_attacked_divides_by_nothing() -> None:
    none = Result(
        {"norm": "l2", "eps": 0.5}, {"clean": flag(0, 0), "fgsm": flag(0, 0)}, costs={"fgsm": cost(0, 0, 0, 0, 0)}
    )
    assert waterfall(none).rows[1:] == (
        ("fgsm", "0", "0", "0.00", "0.00", "0.0", "", "", ""),
        ("total", "0", "0", "0.00", "0.00", "0.0", "", "", ""),
    )


def test_a_plan_that_was_not_run(result: Result) -> None:
    with pytest.raises(ConfigError, match="unknown waterfall plan 'autoo'; known: auto; did you mean 'auto'"):
        waterfall(result, "autoo")


def test_no_attack_no_waterfall() -> None:
    with pytest.raises(StateError, match="the result has no attack"):
        waterfall(Result({"norm": "linf", "eps": 0.1}, {"clean": flag(1, 0)}))


# The figure


def colours(path: Path) -> dict[tuple[int, ...], int]:
    with Image.open(path) as picture:
        found = picture.convert("RGB").getcolors(1 << 24)
    assert found is not None
    return {colour: count for count, colour in found}  # type: ignore[misc]


BLUE, RED, GREEN = (0, 114, 178), (213, 94, 0), (0, 158, 115)


@pytest.mark.parametrize("plan", [None, "auto"])
def test_bars_have_the_height_of_what_they_show(result: Result, tmp_path: Path, plan: str | None) -> None:
    path = draw_waterfall(result, tmp_path / "fall.png", plan=plan)
    assert [p.name for p in tmp_path.iterdir()] == ["fall.png"]
    seen = colours(path)
    end = 0.5 if plan else 0.4
    assert seen[RED] / seen[BLUE] == pytest.approx((0.8 - end) / 0.8, rel=0.05)
    assert seen[GREEN] / seen[BLUE] == pytest.approx(end / 0.8, rel=0.05)


def test_a_single_broken_sample_can_be_seen(tmp_path: Path) -> None:
    right = torch.ones(10_000, dtype=torch.bool)
    broken = right.clone()
    broken[0] = False
    assert (
        colours(
            draw_waterfall(Result({"norm": "linf", "eps": 0.1}, {"clean": right, "a": broken}), tmp_path / "f.png")
        )[RED]
        > 100
    )
    assert RED not in colours(
        draw_waterfall(Result({"norm": "linf", "eps": 0.1}, {"clean": right, "a": right}), tmp_path / "f.png")
    )


def test_no_global_state_of_matplotlib(result: Result, tmp_path: Path) -> None:
    import sys

    before = "matplotlib.pyplot" in sys.modules
    draw_waterfall(result, tmp_path / "fall.png")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_the_caption_says_what_was_measured(result: Result) -> None:
    text = caption(result)
    for part in ("n = 10", "linf eps 8/255", "float16, fused", "seed 3", "a device"):
        assert part in text
    assert "findings" not in text
    doubted = replace(
        result,
        threat={"norm": "l2", "eps": 0.5},
        findings=(Finding("E07", "m", "c"), Finding("E05", "m", "c"), Finding("E07", "m", "c")),
        provenance={"data": "digits test, 10 of 500 samples"},
    )
    assert caption(doubted) == "digits test, 10 of 500 samples; l2 eps 0.5; findings E05, E07"
