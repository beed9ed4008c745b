"""A run that is named by its folder: the recipe it began with."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.tensorfile import load
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
    return file


def recipe_there(file: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What the recipe.yaml of a run says, as `read` reads it; if it is lost or damaged, what the run's weights do."""
    try:
        return read(file)
    except ConfigError as error:
        kept = recipe_beside_weights(RunFolder(file.parent))
        if kept is None:
            run = file.parent
            raise ConfigError(
                f"{error}\nno state or checkpoint of run {run} has its recipe either; resume it by the name of its "
                f"recipe, with --run-dir {run} (in Python: folder=...)"
            ) from error
        return dict(kept)


def recipe_beside_weights(folder: RunFolder) -> Mapping[str, Any] | None:
    """The recipe that the newest state or checkpoint of a run holds; None if none of them can be read.

    Attacks that were named after it was stored are not in it.
    """
    states, ends = (folder.state, folder.older_state), (folder.last, folder.average_last)
    for file in (*states, *ends, folder.best, folder.average_best):
        with suppress(StateError):
            recipe = load(file)[1].get("recipe")
            if isinstance(recipe, Mapping):
                return recipe
    return None
