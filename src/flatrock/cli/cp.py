"""`flatrock cp`: a recipe as a file of your own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from flatrock.cli.console import friendly, say
from flatrock.core.errors import StateError
from flatrock.core.files import write_atomic
from flatrock.recipes.load import copied, load_recipe
from flatrock.recipes.text import recipe_text


def run(
    recipe: Annotated[str, typer.Argument(help="a name of `flatrock ls recipes`")],
    file: Annotated[str, typer.Argument(help="where to write it, for example my.yaml, or a folder, sub/ if it is new")],
) -> None:
    """Copy a recipe, complete and self-contained, to a file to edit."""
    with friendly():
        found = load_recipe(recipe)
        folder = file.endswith("/") or Path(file).is_dir()
        target = _target(Path(file) / Path(recipe).name if folder else Path(file))
        if target.exists():
            raise StateError(f"{target} exists and is left alone; choose another name")
        # What is copied is there to be edited: what was said of it, and how it scored, is not of what it becomes.
        said = {"summary": f"copied from {recipe}; say here what it is"}
        said |= {"expect": copied(found.about.expected, recipe)} if found.about.expected else {}
        about = found.about.model_copy(update={"bands": {}, **said})
        text = recipe_text(found.model_copy(update={"name": target.stem, "about": about}), called=target.name)
        write_atomic(target, text.encode())
        say(f"wrote {target}; edit it, then: flatrock check {shlex.quote(str(target))}")


def _target(file: Path) -> Path:
    """The file with .yaml at its end; my.v2 becomes my.v2.yaml."""
    return file if file.suffix in (".yaml", ".yml") else file.with_name(f"{file.name}.yaml")
