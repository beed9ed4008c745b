"""Runs -> studies of robust overfitting: measure how sharp their kept weights lie, resumably."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from flatrock.attacks.catalog import describe, parse_attack
from flatrock.core.errors import ConfigError, FlatrockError, StateError
from flatrock.core.progress import Progress, Silent
from flatrock.diagnostics.overfit import Selection, Study, check_selections
from flatrock.engine.folder import RunFolder
from flatrock.recipes.build import build_threat
from flatrock.recipes.restore import open_checkpoint, trained_recipe
from flatrock.workflows.checkpoints import KEPT, checkpoints
from flatrock.workflows.landscape import measure_landscape
from flatrock.workflows.landscape_alike import check_comparable
from flatrock.workflows.landscape_plan import Plan
from flatrock.workflows.trained import REPLACED


def sharpness_plan(radius: float = 0.5, **options: object) -> Plan:
    """The landscape that tells sharpness: the middle and both sides at this radius."""
    return Plan(points=3, span=radius, **options)  # type: ignore[arg-type]


class _Share(Silent):
    """One landscape's part of a longer bar: a unit for each of its points, measured now or before."""

    def __init__(self, whole: Progress, units: int) -> None:
        self._whole, self._left = whole, units

    def begin(self, task: str, total: int, done: int = 0) -> None:
        """Count what was there."""
        self.advance(done)

    def advance(self, units: int, note: str = "") -> None:
        """Move the whole bar."""
        self._left -= units
        self._whole.advance(units, note)

    def say(self, text: str) -> None:
        """Pass on what is known of this landscape alone; what is odd of its run was said before."""
        if text.startswith(REPLACED):
            self._whole.say(text)

    def finish(self, note: str) -> None:
        """Count what was read instead of measured."""
        self.advance(self._left, note)


def _one_per_epoch(files: Sequence[Path]) -> list[Path]:
    """The files without a second one of the same epoch, such as last beside the last epoch kept."""
    chosen: dict[int, Path] = {}
    for file in files:
        meta = open_checkpoint(file)[2]
        chosen.setdefault(meta["record"]["epoch"] if "record" in meta else meta["epoch"], file)
    return list(chosen.values())


def _looked_up(folders: Sequence[Path], which: Sequence[str]) -> dict[Path, list[Path]]:
    """The checkpoints of each run."""
    names = [folder.name for folder in folders]
    if len(set(names)) != len(names):
        raise ConfigError(f"runs are told apart by the names of their folders, got {names}; rename or leave out one")
    for folder in folders:
        if folder.is_file():
            raise StateError(f"{folder} is a file; a study needs the run folder, with all its epochs")
    return {folder: _one_per_epoch(checkpoints(folder, which)) for folder in folders}


def _selection(file: Path) -> Selection:
    """How the run of a checkpoint chose its best epoch."""
    recipe = trained_recipe(open_checkpoint(file)[2]["recipe"], str(file), Silent())
    asked = recipe.select.attack
    try:
        label, attack = parse_attack(asked)
    except FlatrockError:  # one of the user's, whose file is not here
        return Selection(recipe.select.data, str(asked), {"name": str(asked)})
    return Selection(recipe.select.data, label, describe(attack, build_threat(recipe)))


def study_runs(
    folders: Sequence[Path],
    plan: Plan,
    *,
    which: Sequence[str] = (KEPT,),
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    resume: bool = True,
    progress: Progress | None = None,
) -> dict[str, Study]:
    """A study of each run by its folder's name; every run is looked at before the first landscape is measured.

    With `resume`, landscapes measured before are read, and one that was stopped goes on.
    """
    files = _looked_up([folder.resolve() for folder in folders], which)
    every = [file for found in files.values() for file in found]
    selections = {folder: _selection(found[0]) for folder, found in files.items() if found}
    check_comparable(every, plan, data_folder=data_folder, device=device, progress=progress)
    # After threats: options of an attack follow from them.
    check_selections({folder.name: one for folder, one in selections.items()})
    listener, points = progress or Silent(), 1 + 2 * (plan.directions or 1)
    listener.begin("sharpness of kept weights", points * sum(map(len, files.values())))
    studies = {}
    try:
        for folder, found in files.items():
            measured = []
            for file in found:
                share = _Share(listener, points)
                record, _ = measure_landscape(
                    file, plan, data_folder=data_folder, device=device, resume=resume, progress=share
                )
                share.finish(f"{folder.name} {file.stem}")
                measured.append(record)
            measured.sort(key=lambda record: int(record.provenance["epoch"]))
            studies[folder.name] = Study(RunFolder(folder).run(), tuple(measured), selections[folder])
    finally:
        listener.end()
    return studies
