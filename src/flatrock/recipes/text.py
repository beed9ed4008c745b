"""A recipe as YAML text with its header."""

from __future__ import annotations

import shlex

from flatrock.recipes.schema import Recipe


def recipe_text(recipe: Recipe, *, called: str = "") -> str:
    """Every key, defaults included, under a comment that says what the recipe is and how to run it.

    `called` is the name or file it is trained by; left out, a file of its name.
    """
    import yaml

    about = recipe.about
    said = {"": about.summary, "source: ": about.source, "expect: ": about.expected, "time:   ": about.time}
    lines = [f"# {what}{text}" for what, text in said.items() if text]
    lines += [f"# run:    flatrock train {shlex.quote(called or f'{recipe.name}.yaml')} [key=value ...]", ""]
    return "\n".join(lines) + yaml.safe_dump(recipe.resolved(), sort_keys=False, default_flow_style=None, width=110)
