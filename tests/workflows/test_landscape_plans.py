"""What a landscape can be asked for, and the names of its files."""

from __future__ import annotations

from typing import Any

import pytest

from flatrock.core.errors import ConfigError, FlatrockError
from flatrock.core.threat import L2, Linf
from flatrock.engine.folder import OWN_FILE
from flatrock.workflows.landscape_plan import Plan


def test_the_edge_of_an_l2_threat() -> None:
    plan = Plan(kind="input")
    assert plan.axis(L2(0.8), 64).span == pytest.approx(0.1), "0.1 in each of 64 pixels has length 0.8"
    assert plan.axis(Linf(0.1), 64).span == 0.1
    assert Plan(kind="input", span=0.3).axis(Linf(0.1), 64).span == 0.3
    with pytest.raises(ConfigError, match="eps 0"):
        plan.axis(Linf(0.0), 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "weight-3d"}, "unknown landscape kind"),
        ({"points": 4}, "odd number"),
        ({"span": 0.0}, "above 0"),
        ({"directions": 0}, "directions must be a whole number"),
        ({"images": 0}, "images must be a whole number"),
        ({"on": "validation"}, "unknown landscape on"),
        ({"attack": "pdg-10"}, "did you mean"),
        ({"precision": "bf16"}, "unknown landscape precision"),
        ({"ids": (1,)}, "have no ids"),
        ({"kind": "input", "directions": 3}, "have no directions"),
        ({"kind": "input", "attack": "pgd-10"}, "have no attack"),
        ({"kind": "input", "ids": (1,), "images": 3}, "keep one"),
    ],
)
def test_nonsense_plans_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FlatrockError, match=message):
        Plan(**options)


def test_names_of_files_tell_landscapes_apart() -> None:
    plans = [
        Plan(),
        Plan(span=0.5),
        Plan(points=11),
        Plan(directions=3),
        Plan(on="test"),
        Plan(images=7),
        Plan(attack="pgd-10:step_size=2/255"),
        Plan(attack="none"),
        Plan(seed=1),
        Plan(kind="weight-2d"),
        Plan(kind="input"),
        Plan(kind="input", span=1.0),
        Plan(kind="input", ids=(3, 4)),
        Plan(kind="input", ids=tuple(range(30))),
        Plan(kind="input", ids=tuple(range(31))),
        Plan(span=0.12345678),
        Plan(span=0.12345679),
    ]
    stems = {plan.stem("best") for plan in plans}
    assert len(stems) == len(plans)
    assert all(OWN_FILE.fullmatch(f"{stem}.json") and OWN_FILE.fullmatch(f"{stem}.part") for stem in stems)
    assert Plan(span=2).stem("best") == Plan(span=2.0).stem("best")
