"""`flatrock train --seeds`: one run for each seed, all looked at first, shared with others of the same command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from flatrock.cli.console import errors, say, show
from flatrock.core.errors import BusyError, ConfigError, FlatrockError, StateError
from flatrock.core.runs import Run
from flatrock.engine.folder import ENDED, RunFolder
from flatrock.recipes.pieces import recipe_hash
from flatrock.recipes.schema import Recipe
from flatrock.reports.seeds import trained_seeds
from flatrock.workflows.folders import check_untrained, elsewhere_made, is_made, making, nothing_lost, place_faults

# Trains a recipe into a folder and tells how it went; None if that failed.
Train = Callable[..., Run | None]
ELSEWHERE = "repeat the overrides it began with, leave out its seed, or choose another --run-dir"


@dataclass
class SeveralSeeds:
    """Runs of one recipe that differ in their seed, each in its folder."""

    recipes: Mapping[int, Recipe]
    folders: Mapping[int, Path]
    _: KW_ONLY
    resume: bool
    overwrite: bool
    _seen: dict[int, int] = field(default_factory=dict)  # when run.json of each was written, before anything was begun

    def look(self) -> None:
        """ConfigError with all that do not fit, before any is trained. Those that others train now are no obstacle."""
        if self.resume and self.overwrite:
            raise StateError("--resume and --overwrite exclude each other; choose one")
        self._seen = {seed: _written(folder) for seed, folder in self.folders.items()}
        faults = {seed: self._faults(seed) for seed in self.recipes}
        told = [f"seed {seed}: {fault}" for seed, found in faults.items() for fault in found]
        if taken := [str(folder) for seed, folder in self.folders.items() if self._taken(seed)]:
            told.append(
                f"in use: {', '.join(taken)}; continue with --resume (finished runs are kept), replace with "
                "--overwrite, or choose another place with --run-dir"
            )
        if told:
            raise ConfigError("no seed was trained:", tuple(told))

    def _faults(self, seed: int) -> list[str]:
        """What keeps one from being begun or resumed."""
        folder = RunFolder(self.folders[seed])
        if not (self.resume or self.overwrite):
            return []  # nothing may lie there, whatever it is
        if self.overwrite:
            mine = not folder.in_use() or folder.info.is_file() or folder.barely_begun()
            return [] if mine else [f"{folder.path} holds something that is not a flatrock run, and is left alone"]
        try:
            found = place_faults(self.recipes[seed], folder.path, elsewhere=ELSEWHERE)
            waits = folder.in_use() and not (nothing_lost(folder) or is_made(folder.path))
            if not found and waits and folder.read_info()["status"] not in ENDED:
                folder.check_resumable()
        except FlatrockError as error:
            if folder.begun() and _owner(folder) in ("", recipe_hash(self.recipes[seed])):
                return []  # resuming writes the small files again from its state
            return [f"{error} (of this seed alone: --overwrite with --seeds replaces all)"]
        return found

    def _taken(self, seed: int) -> bool:
        """Whether something lies where nothing may, other than what another process is making now."""
        place = self.folders[seed]
        return not (self.resume or self.overwrite) and RunFolder(place).in_use() and not is_made(place)

    def train(self, train: Train, **how: Any) -> tuple[dict[int, Run | None], dict[int, str]]:
        """The runs, None for one that failed; and why some are left to others, who train them now."""
        runs: dict[int, Run | None] = {}
        left: dict[int, str] = {}

        def turns(seeds: Sequence[int]) -> bool:
            """Whether one of these is there now."""
            for seed in seeds:
                say(f"seed {seed}")
                try:
                    with making(self.folders[seed]):
                        runs[seed] = self._one(seed, train, how)
                        left.pop(seed, None)
                except BusyError as error:
                    left[seed] = str(error)
                    say(("left ", "yellow"), f"seed {seed}: {error}", to=errors)
            return not left.keys() >= set(seeds)

        turns(list(self.recipes))
        # Others may have ended, or been killed, since their seeds were passed. A look that changes nothing is the last.
        while turns([seed for seed in left if not elsewhere_made(self.folders[seed])]):
            pass
        return {seed: runs[seed] for seed in self.recipes if seed in runs}, left

    def _one(self, seed: int, train: Train, how: Mapping[str, Any]) -> Run | None:
        folder, resume, overwrite = RunFolder(self.folders[seed]), self.resume, self.overwrite
        check_untrained(folder)
        if not resume and folder.in_use() and not (overwrite and _written(folder.path) == self._seen[seed]):
            return _of_another(folder)
        if resume and folder.in_use() and nothing_lost(folder):
            say(f"{folder.path} was stopped before anything of it was stored; it begins again")
            resume, overwrite = False, True
        return train(self.recipes[seed], folder.path, resume=resume, overwrite=overwrite, **how)

    def tell(self, runs: Mapping[int, Run | None], left: Mapping[int, str]) -> None:
        """A table of the seeds that are there, and which are not."""
        if runs:
            name = next(iter(self.recipes.values())).name
            seeds = f"{len(runs)} seed{'' if len(runs) == 1 else 's'}"
            show(trained_seeds(runs), f"{seeds} of {name}, on the data that choose epochs")
        for seed, why in left.items():
            say(("not made ", "yellow"), f"seed {seed}: {why}; then the same command with --resume")


def _owner(folder: RunFolder) -> str:
    """The recipe hash of run.json; nothing if it is damaged."""
    try:
        return folder.owner()
    except StateError:
        return ""


def _written(folder: Path) -> int:
    """When run.json was last written; 0: never."""
    try:
        return RunFolder(folder).info.stat().st_mtime_ns
    except OSError:
        return 0


def _of_another(folder: RunFolder) -> Run | None:
    """A run that was not there when this command began, as another process has made it since; None if it failed."""
    info = folder.read_info()
    if info["status"] == "failed":
        say(("FAILED: ", "bold red"), f"{folder.path}, of another process: {info.get('reason')}", to=errors)
        return None
    if info["status"] not in ENDED:
        said = f"{folder.path} was begun by another process and is not finished"
        raise BusyError(f"{said}; wait for it, or, if nobody trains it any more, go on with --resume")
    say(f"{folder.path} was made by another process meanwhile")
    return folder.run()
