"""`flatrock cp`: a recipe as a file of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import console, friendly
from flatrock.core.errors import StateError
from flatrock.core.files import write_atomic
from flatrock.recipes.load import load_recipe
from flatrock.recipes.text import recipe_text


def run(
    recipe: Annotated[str, typer.Argument(help="a name of `flatrock ls recipes`")],
    file: Annotated[Path, typer.Argument(help="where to write it, for example my.yaml")],
) -> None:
    """Copy a recipe, complete and self-contained, to a file to edit."""
    with friendly():
        target = file if file.suffix in (".yaml", ".yml") else file.with_suffix(".yaml")
        if target.exists():
            raise StateError(f"{target} exists and is left alone; choose another name")
        found = load_recipe(recipe)
        write_atomic(target, recipe_text(found.model_copy(update={"name": target.stem})).encode())
        console.print(f"wrote {target}; edit it, then: flatrock check {target}", highlight=False)
