"""A recipe as YAML text with its header."""

from __future__ import annotations

from flatrock.recipes.schema import Recipe


def recipe_text(recipe: Recipe) -> str:
    """Every key, defaults included, under a comment that says what the recipe is and how to run it."""
    import yaml

    about = recipe.about
    header = [about.summary, f"source: {about.source}", f"expect: {about.expect}", f"time:   {about.time}"]
    lines = [f"# {line}" for line in header if not line.endswith(": ")]
    lines += [f"# run:    flatrock train {recipe.name}.yaml [key=value ...]", ""]
    return "\n".join(lines) + yaml.safe_dump(recipe.resolved(), sort_keys=False, default_flow_style=None, width=110)
