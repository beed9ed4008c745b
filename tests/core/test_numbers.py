"""Numbers as people write them, and text that must never be taken for one."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from flatrock.core.errors import ConfigError
from flatrock.core.numbers import in_levels, number, plain, scalar, scaled


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/255", 8 / 255),
        (" 8 / 255 ", 8 / 255),
        ("1e-3", 0.001),
        ("5E-4", 5e-4),
        (".5", 0.5),
        ("5.", 5.0),
        ("-2", -2.0),
        ("+0.25", 0.25),
        ("1.5/3e0", 0.5),
        ("-1/4", -0.25),
        (3, 3.0),
        (0.1, 0.1),
    ],
)
def test_numbers_are_read(text: Any, value: float) -> None:
    result = number(text)
    assert result == value
    assert isinstance(result, float)


@pytest.mark.parametrize("text", ["1/0", "0/0", "1/0.0", "3/-0"])
def test_division_by_zero_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="divides by zero"):
        number(text)


@pytest.mark.parametrize(
    "text",
    ["", " ", "inf", "-inf", "nan", "Infinity", "__import__('os')", "1+1", "1//2", "1/2/3", "0x10", "1e", "e3"],
)
def test_other_text_is_refused_by_value(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number or a fraction such as 8/255, got"):
        number(text)


@pytest.mark.parametrize("value", [True, False, None, [1], {"a": 1}, 1j, b"1"])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="expected a number"):
        number(value)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), "1e999", "-1e999", "1e300/1e-300"])
def test_non_finite_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="finite"):
        number(value)


def test_an_integer_beyond_float_is_refused_not_a_crash() -> None:
    with pytest.raises(ConfigError, match="finite"):
        number(10**400)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("none", "none"),
        ("20", 20),
        ("-3", -3),
        ("2/255", 2 / 255),
        ("1e-3", 0.001),
        ("cw", "cw"),
        ("inf", "inf"),
        ("nan", "nan"),
        ("__import__", "__import__"),
        ("1.2.3", "1.2.3"),
        ("", ""),
    ],
)
def test_words_of_the_command_line(text: str, value: Any) -> None:
    result = scalar(text)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize("text", ["8/0", "1e999"])
def test_a_word_that_is_no_finite_number_stays_text(text: str) -> None:
    assert scalar(text) == text


def test_numbers_of_other_kinds_become_pythons() -> None:
    for value, wanted in (
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        (True, True),
        ("1/2", "1/2"),
    ):
        found = plain(value)
        assert found == wanted
        assert type(found) is type(wanted)
    assert plain(np.True_) is np.True_


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1500, "1.5 kB"),
        (7.19e9, "7.19 GB"),
        (999e6, "999 MB"),
        (3e15, "3 PB"),
        (4e18, "4000 PB"),
    ],
)
def test_sizes_have_the_unit_that_fits(value: float, told: str) -> None:
    assert scaled(value, "B") == told


@pytest.mark.parametrize("k", [*range(-60, 60), 128, 254, 255, 300, 630])
def test_levels_are_written_unless_the_decimal_is_short(k: int) -> None:
    short = Fraction(k, 255).denominator in (1, 5)
    assert in_levels(k / 255) == ("" if short else f"{k}/255")


@pytest.mark.parametrize("value", [0.031, 0.031373, 0.03137255, 0.1, 1e-12, 1 + 1e-12, 1e300, np.inf, np.nan, 0, 1])
def test_other_numbers_are_no_levels(value: float) -> None:
    assert in_levels(value) == ""
