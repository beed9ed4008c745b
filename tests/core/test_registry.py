"""Named things: what is listed, what a miss says, and that two things never share a name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from flatrock.core.errors import ConfigError
from flatrock.core.registry import Registry, unknown


@dataclass(frozen=True, kw_only=True)
class Kettle:
    """Something to register."""

    litres: float = 1.0
    colour: str = "red"


def kettles() -> Registry[Kettle]:
    registry: Registry[Kettle] = Registry("kettle")
    registry.add("small", Kettle, "half a litre", cite="Tea 1901", litres=0.5)
    registry.add("large", Kettle, "two litres")
    return registry


def test_rows_keep_their_order_and_description() -> None:
    registry = kettles()
    assert registry.names() == ["small", "large"]
    assert [(e.name, e.summary, e.cite) for e in registry] == [
        ("small", "half a litre", "Tea 1901"),
        ("large", "two litres", ""),
    ]
    assert "small" in registry
    assert "tiny" not in registry


def test_options_are_those_the_row_does_not_fix() -> None:
    registry = kettles()
    assert registry.entry("small").options() == ("colour",)
    assert registry.entry("large").options() == ("litres", "colour")


def test_make_joins_fixed_and_given_options() -> None:
    registry = kettles()
    assert registry.make("small", colour="blue") == Kettle(litres=0.5, colour="blue")
    assert registry.make("large") == Kettle()


@pytest.mark.parametrize("ask", ["make", "entry"])
def test_an_unknown_name_lists_the_choices_and_the_nearest(ask: str) -> None:
    with pytest.raises(ConfigError, match="unknown kettle 'smal'; known: large, small; did you mean 'small'"):
        getattr(kettles(), ask)("smal")


def test_a_name_near_nothing_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        kettles().make("zzz")
    assert "known: large, small" in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_unknown_options_are_all_reported_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        kettles().make("large", liters=2, color="blue")
    text = str(caught.value)
    assert "'liters'" in text
    assert "did you mean 'litres'?" in text
    assert "'color'" in text
    assert "did you mean 'colour'?" in text


def test_an_option_the_row_fixes_cannot_be_given() -> None:
    with pytest.raises(ConfigError, match="'litres'; known: colour"):
        kettles().make("small", litres=3)


def test_a_name_is_given_once() -> None:
    registry = kettles()
    with pytest.raises(ValueError, match="kettle 'small' is registered twice"):
        registry.add("small", Kettle, "again")
    assert registry.make("small").litres == 0.5


def test_unknown_describes_any_value() -> None:
    assert unknown("start", None, ["zero", "gaussian"]) == "unknown start None; known: gaussian, zero"
    assert unknown("start", 3, []) == "unknown start 3; known: none"


def test_faults_of_config_errors_are_listed_line_by_line() -> None:
    error = ConfigError("two faults:", ("first", "second"))
    assert str(error) == "two faults:\n  - first\n  - second"
    assert error.faults == ("first", "second")


def test_very_many_choices_are_not_listed_in_full() -> None:
    names = [f"recipe_{i:03d}" for i in range(100)] + ["something_else"]
    text = unknown("recipe", "recipe_0077", names)
    assert "101 of them, such as recipe_077, " in text
    assert "something_else" not in text
    assert "did you mean 'recipe_077'" in text
    assert "101 of them, such as recipe_000" in unknown("recipe", "@@@@@@@@", names)
    assert "known: a, b" in unknown("thing", "c", ["b", "a"])


def test_choices_are_listed_once_and_the_question_comes_last() -> None:
    told = unknown("key", "moment", ["lr", "momentum", "lr"], more=" (see there)")
    assert told == "unknown key 'moment'; known: lr, momentum (see there); did you mean 'momentum'?"
    assert unknown("key", "x9", ["lr"], near="x-9").endswith("known: lr; did you mean 'x-9'?")
