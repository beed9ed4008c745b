"""Numbers as people write them: 8/255, 1e-3, 0.5. A grammar, not `eval`."""

from __future__ import annotations

import math
import re
import sys
from numbers import Integral, Real
from typing import Any, TypeGuard

from flatrock.core.errors import ConfigError

_FLOAT = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NUMBER = re.compile(rf"\s*({_FLOAT})\s*(?:/\s*({_FLOAT})\s*)?")


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is a number of Python's, and not True or False."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether this is a number, and neither NaN nor infinite."""
    return is_number(value) and math.isfinite(value)


def number(value: Any) -> float:
    """A finite number from a number or from text such as '8/255' or '5e-4'."""
    if is_number(value):
        result = float(value) if abs(value) <= sys.float_info.max else math.inf
    elif isinstance(value, str) and (match := _NUMBER.fullmatch(value)):
        bottom = float(match[2]) if match[2] else 1.0
        if bottom == 0:
            raise ConfigError(f"{value!r} divides by zero")
        result = float(match[1]) / bottom
    else:
        raise ConfigError(f"expected a number or a fraction such as 8/255, got {value!r}")
    if not math.isfinite(result):
        raise ConfigError(f"expected a finite number, got {value!r}")
    return result


def scaled(value: float, unit: str) -> str:
    """7.19e9, 'FLOP' -> '7.19 GFLOP'."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}" if value < 1000 * size else f"{value / size:.0f} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def in_levels(value: float) -> str:
    """8/255 where a number is that, as papers write it; nothing where it is not, or a short decimal: 0.2 is 51/255.

    k/255 = k / (5 * 51) ends after a decimal if 51 divides k, else never. No radius is 1000.
    """
    levels = round(255.0 * value, 9)
    return f"{levels:.0f}/255" if abs(value) < 1000 and levels.is_integer() and levels % 51 else ""


def plain(value: Any) -> Any:
    """A number of numpy's, or of another kind, as Python's int or float, which can be stored; the rest as it is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def scalar(text: str) -> Any:
    """The value of a word on the command line: true/false/null, integer, number or fraction, else the text itself."""
    words = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    try:
        return number(text) if _NUMBER.fullmatch(text) else text
    except ConfigError:
        return text  # 1/0 or 1e999: whoever expects a number says what is wrong with it, and where
