"""Before runs are made: what lies where they would go, and who else is making them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flatrock.core.errors import BusyError
from flatrock.core.locks import is_held, locked
from flatrock.core.progress import Silent
from flatrock.engine.folder import RunFolder
from flatrock.recipes.filled import unlike
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.restore import stored_recipe
from flatrock.recipes.schema import Recipe


@contextmanager
def making(place: Path) -> Iterator[None]:
    """Of several processes that share work each run has one who makes it: looks what there is, trains, evaluates.

    BusyError if another does. The lock lies beside the folder: that of the run itself is held while it is trained.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with locked(_lock(place), "making", place):
        yield


def is_made(place: Path) -> bool:
    """Whether a process makes or trains this run now."""
    return bool(is_held(_lock(place)) or is_held(RunFolder(place).lock))


def elsewhere_made(place: Path) -> str:
    """Which process makes or trains this run now, in words; nothing if none does."""
    try:
        if is_held(_lock(place)):  # who asks for it in vain is told by whom it is held
            with making(place):
                pass
        check_untrained(RunFolder(place))
    except BusyError as error:
        return str(error)
    return ""


def check_untrained(folder: RunFolder) -> None:
    """BusyError, which names the process, if one is training this run now."""
    if is_held(folder.lock):
        with folder.locked("looking at"):
            pass


def _lock(place: Path) -> Path:
    return place.with_name(f".{place.name}.lock")


def nothing_lost(folder: RunFolder) -> bool:
    """Whether a run was killed before its first state was whole: it has nothing but a beginning, and begins again."""
    first = {folder.lock.name, folder.info.name, f".{folder.info.name}.part", f".{folder.state.name}.part"}
    return {file.name for file in folder.path.iterdir()} <= first


def place_faults(recipe: Recipe, place: Path, *, elsewhere: str) -> list[str]:
    """A run of another recipe, or something that is no run, lies where this one would; `elsewhere` is the cure."""
    folder = RunFolder(place)
    if not folder.in_use() or folder.barely_begun():
        return []
    if not folder.info.is_file():
        return [f"{place} holds something that is not a flatrock run; {elsewhere}"]
    there = str(folder.read_info()["recipe_hash"])
    # Whether it could be trained here is of no interest: it is looked at for what is different.
    stored = stored_recipe(folder, Silent()) if folder.recipe.exists() else None
    # Other attacks are no other run: its weights are as wanted, and are evaluated anew.
    odd = [] if stored is None else unlike(stored, recipe)
    if there == recipe_hash(recipe) and not odd:
        return []
    told = f": {'; '.join(odd[:3])}{' ...' if len(odd) > 3 else ''}" if odd else ""
    return [f"{place} is a run of another recipe{told}; remove it, or {elsewhere}"]
