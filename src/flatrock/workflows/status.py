"""Where runs stand: what their small files say, of hundreds of them in a moment."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.files import unsealed
from flatrock.core.headers import Header, read_header
from flatrock.core.locks import is_held
from flatrock.core.provenance import checkpoint_of
from flatrock.core.runs import EpochRecord
from flatrock.engine.folder import ENDED, RunFolder

DAMAGED = "damaged"
RUNNING, KILLED = "running now", "killed"
# Who says that it is running, by whether a process holds its lock; None: there are no locks here.
AT_WORK = {True: RUNNING, False: KILLED, None: "running or killed"}
# The pace is that of so many epochs at most: a machine is not always as busy as it is now.
PACE = 20
# `recipe.yaml` is written by flatrock, so keys of `train` stand below it, one in a line.
_SECTION = re.compile(r"^train:\n((?:[ ]+.*\n?)*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a run stands. Accuracies are fractions; `best` is the record of the epoch it is known by, `results` the
    heads of its results by file, `eta` seconds to go of one that is running, `why` what stopped or damaged it."""

    folder: Path
    status: str
    epoch: int = 0
    epochs: int | None = None
    best: EpochRecord | None = None
    averaged: bool = False
    eta: float | None = None
    results: dict[Path, Header] = field(default_factory=dict)
    main: Path | None = None
    stale: tuple[Path, ...] = ()
    part: int = 0
    written: float = 0.0
    why: str = ""

    @property
    def clean(self) -> float | None:
        """Clean accuracy of the best epoch on the data that chose it."""
        return None if self.best is None else self.best.average_clean if self.averaged else self.best.clean

    @property
    def robust(self) -> float | None:
        """Robust accuracy of the best epoch on the data that chose it."""
        return None if self.best is None else self.best.average_robust if self.averaged else self.best.robust

    @property
    def evaluated(self) -> Header | None:
        """The head of the result it is known by: that of the recipe's own plan, else the newest of that checkpoint."""
        return None if self.main is None else self.results[self.main]


def find_runs(places: Iterable[Path]) -> list[Path]:
    """The run folders named, and those anywhere in folders named, sorted; ConfigError if there is none in one."""
    found: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise ConfigError(f"there is no folder {place}; name runs, or folders of runs")
        below = sorted(_below(place))
        if not below:
            raise ConfigError(f"there is no run in {place}: nothing in it has a run.json")
        found |= dict.fromkeys(below)
    return list(found)


def _below(place: Path) -> Iterator[Path]:
    """Runs hold no runs, and what cannot be listed holds none that can be read; links are followed to runs alone."""
    if (place / "run.json").exists():
        yield place
        return
    try:
        with os.scandir(place) as entries:
            folders = [(entry.name, entry.is_symlink()) for entry in entries if entry.is_dir()]
    except OSError:
        return
    for name, linked in folders:
        if not linked:
            yield from _below(place / name)
        elif (place / name / "run.json").exists():
            yield place / name


def standings(runs: Sequence[Path]) -> list[Standing]:
    """One for each run; one that is damaged says so, and ends nothing."""
    return [standing(run) for run in runs]


def standing(run: Path) -> Standing:
    """Where one run stands."""
    folder = RunFolder(run)
    results, faults = _results(run)
    known: dict[str, Any] = {"results": results, "written": _written(folder, results)}
    known["part"] = sum(1 for part in run.glob("result-*.part") if part.is_dir())
    try:
        info = folder.read_info()
        known |= {"status": str(info["status"]), "why": str(info.get("reason", ""))}
        if info["status"] == "running":
            known["status"] = AT_WORK[is_held(folder.lock)]
        known |= _progress(folder, info, running=known["status"] == RUNNING)
        wanted = run / f"result-{'average-best' if known.get('averaged') else 'best'}.json"
        known["stale"] = tuple(_stale(results, str(info["recipe_hash"]), known.pop("now", {})))
    except (StateError, OSError, ValueError, TypeError) as error:  # a record of another version has other keys
        known.pop("now", None)
        return Standing(folder=run, **{**known, "status": DAMAGED, "why": _first(error)})
    which = wanted.stem.removeprefix("result-")  # what the run is known by; of other epochs no number is its own
    heads = {file: head for file, head in results.items() if file not in known["stale"]}
    own = [file for file, head in heads.items() if checkpoint_of(head.provenance) == which]
    newest = max(own, key=lambda file: file.stat().st_mtime, default=None)
    known["main"] = wanted if wanted in own else newest
    if faults:
        known |= {"status": DAMAGED, "why": "; ".join(faults)}
    return Standing(folder=run, **known)


def counted(found: Sequence[Standing]) -> str:
    """How many there are of each status."""
    many = Counter(one.status for one in found)
    return f"{len(found)} run{'' if len(found) == 1 else 's'}: " + ", ".join(f"{n} {kind}" for kind, n in many.items())


def _progress(folder: RunFolder, info: Mapping[str, Any], *, running: bool) -> dict[str, Any]:
    """How far it is, its best epoch, how long the rest takes, and the epochs its checkpoints are of `now`."""
    lines = folder.metrics.read_text().split("\n")[:-1] if folder.metrics.exists() else []  # one may just be written
    epochs, steps = _length(folder)
    owner = str(info["recipe_hash"])
    last = _record(folder, lines, len(lines), owner) if lines else None
    if info["status"] in ENDED and len(lines) != info.get("epochs_done"):
        raise StateError(f"{folder.metrics} has lost epochs; `train --resume` rebuilds it from the checkpoint")
    if last is None:
        return {"epochs": epochs}
    if steps is not None and epochs is not None:
        epochs = min(epochs, ceil(steps / (last.step / last.epoch)))
    averaged = last.average_best_epoch is not None
    chosen = last.average_best_epoch if averaged else last.best_epoch
    known: dict[str, Any] = {"epoch": last.epoch, "epochs": epochs, "averaged": averaged}
    known["best"] = None if chosen is None else _record(folder, lines, chosen, owner)
    known["now"] = {"best": last.best_epoch, "average-best": last.average_best_epoch}
    known["now"] |= dict.fromkeys(("last", "average-last"), last.epoch)
    if running and epochs is not None:
        first = None if len(lines) == 1 else _record(folder, lines, max(len(lines) - PACE, 1), owner)
        pace = _pace(first, last)
        # Another machine's clock may have dated the file.
        since = min(max(time.time() - folder.metrics.stat().st_mtime, 0.0), pace)
        known["eta"] = max((epochs - last.epoch) * pace - since, 0.0)
    return known


def _record(folder: RunFolder, lines: Sequence[str], epoch: int, owner: str) -> EpochRecord:
    """The record of an epoch, whose number is that of its line."""
    if not 1 <= epoch <= len(lines):
        raise StateError(f"{folder.metrics} has lost epochs")
    record = EpochRecord.from_dict(unsealed(lines[epoch - 1], f"{folder.metrics}, line {epoch}", owner))
    if record.epoch != epoch:
        raise StateError(f"{folder.metrics} has lost epochs")
    return record


def _pace(first: EpochRecord | None, last: EpochRecord) -> float:
    """Seconds per epoch, probes and checkpoints included where that was recorded."""
    if last.elapsed is None:
        return last.seconds
    if first is None or first.elapsed is None:
        return last.elapsed / last.epoch
    return (last.elapsed - first.elapsed) / (last.epoch - first.epoch)


def _length(folder: RunFolder) -> tuple[int | None, int | None]:
    """Epochs and, where they are limited, steps of the recipe; None if it does not say."""
    try:
        section = _SECTION.search(folder.recipe.read_text())
    except (OSError, UnicodeDecodeError):
        return None, None
    found = dict(re.findall(r"^  (epochs|max_steps): (\d+)$", section[1], re.MULTILINE)) if section else {}
    return (int(found["epochs"]) if "epochs" in found else None), int(found.get("max_steps", 0)) or None


def _results(run: Path) -> tuple[dict[Path, Header], list[str]]:
    """The heads of the results, and what is wrong with those that are damaged."""
    heads, faults = {}, []
    for file in sorted(run.glob("result-*.json")):
        try:
            heads[file] = read_header(file)
        except StateError as error:
            faults.append(_first(error))
    return heads, faults


def _stale(results: Mapping[Path, Header], owner: str, now: Mapping[str, int | None]) -> Iterator[Path]:
    """Results of other weights than the run has now: of another recipe, or of an older epoch of a checkpoint."""
    for file, head in results.items():
        about, which = head.provenance, checkpoint_of(head.provenance)
        if about.get("recipe_hash") != owner or about.get("epoch") != now.get(which, about.get("epoch")):
            yield file


def _written(folder: RunFolder, results: Iterable[Path]) -> float:
    """When anything of it was last written; 0.0 if nothing can be looked at."""
    times = [0.0]
    for file in (folder.info, folder.metrics, folder.state, *results):
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
