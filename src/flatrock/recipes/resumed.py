"""A run that is named by its folder: the recipe it began with."""

from __future__ import annotations

import shlex
from pathlib import Path

from flatrock.core.errors import ConfigError
from flatrock.engine.folder import RunFolder


def is_run(source: object) -> bool:
    """Whether this is the folder of a run."""
    return isinstance(source, str | Path) and RunFolder(Path(source)).info.is_file()


def recipe_file(source: str | Path, *, resume: bool) -> Path:
    """The recipe in the folder of a run; ConfigError if it is not to be resumed."""
    file = RunFolder(Path(source)).recipe
    if not resume:
        raise ConfigError(
            f"{source} is a run, not a recipe: continue it with `flatrock train {shlex.quote(str(source))} --resume` "
            f"(in Python: resume=True), or begin another with its recipe, {file}, and --run-dir (in Python: folder=...)"
        )
    if not file.is_file():
        raise ConfigError(
            f"run {source} has no recipe.yaml; resume it by the name of its recipe, with --run-dir {source} "
            "(in Python: folder=...)"
        )
    return file
