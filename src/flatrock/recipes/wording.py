"""Faults of single values in a recipe, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatrock.core.errors import shown
from flatrock.core.guests import WRITE_FILE

WHOLE, YES_NO = "must be a whole number", "must be true or false"
# What a value must be, by the kind of its fault; the names are pydantic's.
RULES = {
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be below {lt:g}",
    "literal_error": "must be {expected}",
    "int_type": WHOLE,
    "int_parsing": WHOLE,
    "int_from_float": WHOLE,
    "int_parsing_size": WHOLE,
    "finite_number": "must be a finite number",
    "bool_type": YES_NO,
    "bool_parsing": YES_NO,
    "string_type": "must be text",
    "string_too_short": "must not be empty",
}


def fault(where: str, error: Mapping[str, Any]) -> str:
    """What is wrong at a key: the value and the rule."""
    got, value = f"got {shown(error['input'])}", error["input"]
    if error["type"] == "string_type" and where.endswith(".name") and callable(value):
        return f"{where}: {got}, but it is named by text; {_by_name(value)}"
    if rule := RULES.get(error["type"]):
        return f"{where}: {got}, but it {rule.format(**error.get('ctx', {}))}"
    text = error["msg"].removeprefix("Value error, ")
    return f"{where}: {text}" if text.endswith(got) else f"{where}: {got}, {text}"


def _by_name(value: Any) -> str:
    """How something of Python's is named instead: by its file and its name in it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if not name or module in (None, "__main__"):
        return WRITE_FILE
    return f"write '{module}:{name}', found if {module}.py lies in the current folder"
