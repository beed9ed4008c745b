"""A recipe as YAML text with its header."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from flatrock.recipes.filled import in_full
from flatrock.recipes.schema import Recipe

WIDTH = 110


def recipe_text(recipe: Recipe, *, called: str = "") -> str:
    """Every key, defaults included, under a comment that says what the recipe is and how to run it.

    What the things named have by default stands in comments, so that a copy is the same recipe, with the same hash.
    `called` is the name or file it is trained by; left out, a file of its name.
    """
    about = recipe.about
    said = {"": about.summary, "source: ": about.source, "expect: ": about.expected, "time:   ": about.time}
    lines = [f"# {what}{text}" for what, text in said.items() if text]
    lines += [f"# run:    flatrock train {shlex.quote(called or f'{recipe.name}.yaml')} [key=value ...]", ""]
    given, full = recipe.resolved(), in_full(recipe)
    return "\n".join(lines) + "".join(_yaml({key: given[key]}) + _unsaid(key, given[key], full[key]) for key in given)


def _yaml(keys: Mapping[str, Any], *, flow: bool | None = None, width: int = WIDTH) -> str:
    import yaml

    if flow is None and not any(isinstance(value, Mapping | list) for value in keys.values()):
        flow = False  # a line of its own for one that is no section
    return str(yaml.safe_dump(keys, sort_keys=False, default_flow_style=flow, width=width))


def _unsaid(section: str, given: Any, full: Any) -> str:
    """Comments with the options that are left to their defaults, and what follows from other keys."""
    if section == "flatness":
        pairs = zip(given, full, strict=True)
        return "".join(_unsaid(f"flatness.{method['name']}", method, whole) for method, whole in pairs)
    if not isinstance(given, Mapping) or given == full:
        return ""
    left = {key: value for key, value in full.items() if key not in given or given[key] != value}
    # A key and its value stay in one line.
    text = f"{section}, by default: {_yaml(left, flow=True, width=10**6)}".replace(": ", ":\0")
    lines = textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines).replace("\0", " ")
