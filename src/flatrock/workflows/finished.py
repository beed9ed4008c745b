"""A run that has ended as its recipe says: there is nothing to resume, and no state is needed for that."""

from __future__ import annotations

from pathlib import Path

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.progress import Progress, Silent
from flatrock.core.runs import Run
from flatrock.engine.folder import ENDED, RunFolder, changed_paths
from flatrock.engine.intact import faults, instead
from flatrock.engine.told import tell_all
from flatrock.recipes.filled import unlike
from flatrock.recipes.pieces import DEFAULT_RUNS, recipe_hash
from flatrock.recipes.restore import stored_keys, stored_recipe, trained_recipe, with_attacks
from flatrock.recipes.resumed import recipe_beside_weights
from flatrock.recipes.schema import Recipe
from flatrock.workflows.results import take_attacks


def finished_before(recipe: Recipe, place: Path | None, progress: Progress | None) -> Run | None:
    """The run of this recipe, if it has ended and its states were deleted; None if it is to be trained or resumed.

    Where states are there resuming goes on to read them: it mends the other files with them.
    """
    folder, listener = RunFolder(place or DEFAULT_RUNS / recipe.name), progress or Silent()
    if folder.begun():
        _check_same(folder, recipe)
    if folder.begun() or _status(folder) not in ENDED:
        return None
    if folder.owner() != recipe_hash(recipe):
        raise StateError(
            f"{folder.path} is a {_status(folder)} run of another recipe{_differences(folder, recipe)}\n"
            "choose another --run-dir (in Python: folder=...), or repeat the overrides it began with"
        )
    try:
        run = folder.run()
    except StateError as error:
        why = str(error).partition("; `")[0]
        raise StateError(
            f"{folder.path} has ended, but {why}, and there is no {folder.state.name} to mend it with; put the file "
            "back from a copy. Its weights can be evaluated and loaded all the same"
        ) from error
    tell_all(f"{folder.path} is {run.status}: there is nothing left to train", listener, inside=-1)
    with folder.locked("writing the recipe of"):
        if _told_lost(folder, listener):
            _mend_recipe(folder, recipe)
        elif (own := _own(folder)) is not None:
            _tell_ignored(folder, own, recipe, listener)
        take_attacks(folder, recipe, listener)  # other attacks are no other run, and what is asked for now counts
    return run


def as_trained(recipe: Recipe, place: Path | None, progress: Progress | None) -> Recipe:
    """The recipe to resume a run with: of one that has ended, with the choices that its weights were trained by.

    Nothing is left to train, so its files must not say that it was trained otherwise. What is to be evaluated, and
    where a helper lies, may have changed since.
    """
    folder = RunFolder(place or DEFAULT_RUNS / recipe.name)
    if folder.metrics.is_file():  # one that was killed before that had no recipe.yaml yet
        _told_lost(folder, progress or Silent())
    if not _is_over(folder, recipe) or folder.owner() != recipe_hash(recipe) or (own := _own(folder)) is None:
        return recipe
    _tell_ignored(folder, own, recipe, progress or Silent())
    return with_attacks(own, recipe).model_copy(update={"objective": recipe.objective})


def _is_over(folder: RunFolder, recipe: Recipe) -> bool:
    """Whether nothing is left to train, as far as its records tell: it may have been killed after the last epoch."""
    try:
        records, most = folder.records(), recipe.train.max_steps
        made = bool(_status(folder) and records)
        cut = made and most is not None and records[-1].step >= most
        return folder.ended() or cut or (made and len(records) >= recipe.train.epochs)
    except StateError:  # mended by who resumes it
        return folder.ended()


def _tell_ignored(folder: RunFolder, own: Recipe, recipe: Recipe, listener: Progress) -> None:
    """What is asked for and cannot be, because the weights were trained otherwise."""
    there, asked = ({key: one.resolved()[key] for key in ("name", "engine", "train")} for one in (own, recipe))
    if ignored := changed_paths(asked, there):
        said = f"nothing is left to train in {folder.path}, which stays as it was trained; not taken over:"
        tell_all("\n  ".join([said, *ignored]), listener, inside=0)


def _told_lost(folder: RunFolder, listener: Progress) -> bool:
    """Whether recipe.yaml is lost or damaged, which is told: attacks that were named late may have been only there."""
    try:
        stored_keys(folder)
    except StateError:
        listener.say(f"{folder.recipe} cannot be read and is written again; look whether `evaluate` is as you want it")
        return True
    return False


def _mend_recipe(folder: RunFolder, recipe: Recipe) -> None:
    """Write recipe.yaml again: as the weights have it, else as it is asked for."""
    import yaml

    folder.write_recipe(yaml.safe_dump((_own(folder) or recipe).resolved(), sort_keys=False))


def _own(folder: RunFolder) -> Recipe | None:
    """The recipe a run was trained with, by its file or else its weights; None if neither can be read."""
    try:
        return stored_recipe(folder, Silent())
    except (StateError, ConfigError):
        kept = recipe_beside_weights(folder)
    own = None if kept is None else trained_recipe(kept, f"the recipe stored in {folder.path}", Silent())
    return own if own is not None and recipe_hash(own) == folder.owner() else None


def tell_damaged(run: Run, progress: Progress | None) -> None:
    """Say which weights of a run that was resumed cannot be read: they lay there since they were written."""
    found = faults(run)
    if found:
        cure = instead(RunFolder(run.folder))
        tell_all("; ".join([*found.values(), cure]), progress or Silent(), inside=-1)


def _status(folder: RunFolder) -> str:
    """That of run.json; nothing if there is none that can be read, which is told by who would resume it."""
    try:
        return str(folder.read_info()["status"])
    except StateError:
        return ""


def _check_same(folder: RunFolder, recipe: Recipe) -> None:
    """StateError if recipe.yaml and run.json agree that this run is of another recipe; else its state will tell."""
    if not _status(folder) or folder.owner() == recipe_hash(recipe) or not (told := _differences(folder, recipe)):
        return
    raise StateError(
        f"{folder.path} belongs to another recipe{told}\n"
        f"name the run alone to continue it as it began (`flatrock train {folder.path} --resume`), repeat the "
        "overrides it began with, or choose another --run-dir"
    )


def _differences(folder: RunFolder, recipe: Recipe) -> str:
    """In what the recipe that lies there is another one, if it can be read."""
    try:
        stored = stored_recipe(folder, Silent())
    except StateError:
        return ""
    return "; differences:\n  " + "\n  ".join(unlike(stored, recipe)[:10])
