"""The tables of docs/evaluation.md: every attack and plan is there, with what it really costs."""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from flatrock.attacks.catalog import ATTACKS
from flatrock.evaluation.plans import PLANS, make_plan

PAGE = Path(__file__).parents[2] / "docs/evaluation.md"


def rows() -> dict[str, list[str]]:
    """Cells by the name in the first one."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_attack_is_listed_with_its_passes_for_ten_classes() -> None:
    told = rows()
    for name in ATTACKS.names():
        assert told[name][0] == str(ATTACKS.make(name).passes(10)), name
    (transfer,) = make_plan(["transfer-pgd-20"], surrogate=nn.Identity())
    assert told["transfer-pgd-20"][0] == str(transfer.attack.passes(10))


def test_every_plan_is_listed_with_its_attacks_in_order_and_its_passes() -> None:
    told = rows()
    for name in PLANS:
        steps = make_plan([name], classes=10)
        assert re.findall(r"`([a-z-]+)`", told[name][0]) == [s.label.rpartition("/")[2] for s in steps], name
        assert told[name][1] == str(sum(s.attack.passes(10) for s in steps)), name


def test_options_and_defaults_are_real() -> None:
    told = rows()
    for name in ATTACKS.names():
        attack = ATTACKS.make(name)
        for option, default in re.findall(r"`(\w+)` \(([\w.-]+)\)", told[name][2]):
            value = getattr(attack, option)
            assert (float(default) if isinstance(value, int | float) else default) == value, (name, option)
