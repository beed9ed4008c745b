"""Which checkpoints of a run are meant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatrock.core.errors import StateError
from flatrock.core.runs import Run
from flatrock.engine.folder import RunFolder
from flatrock.recipes.restore import EPOCH, Source, open_checkpoint

KEPT = "kept"


def checkpoints(source: Source, which: Sequence[str] = ("auto",)) -> list[Path]:
    """The checkpoint files meant: a file is itself; of a run folder auto, best, last, epoch-10, or kept (all epochs).

    StateError if one is not there.
    """
    path = source.folder if isinstance(source, Run) else Path(source)
    if path.is_file():
        return [open_checkpoint(path)[0]]
    found: list[Path] = []
    for name in which:
        if path.is_dir() and (name == KEPT or EPOCH.fullmatch(name)):
            found += _epochs(RunFolder(path), name)
        else:
            found.append(open_checkpoint(path, name)[0])
    return list(dict.fromkeys(found))


def _epochs(folder: RunFolder, name: str) -> list[Path]:
    """The epochs a run kept: all of them, or one."""
    info = folder.read_info()
    kept = sorted(folder.path.glob("epoch-*.safetensors"), key=lambda file: epoch_of(file) or 0)
    if match := EPOCH.fullmatch(name):
        chosen = [file for file in kept if epoch_of(file) == int(match[1])]
    else:
        chosen = kept
    if not chosen:
        epochs = ", ".join(str(epoch_of(file)) for file in kept) or "none"
        missing = "no epoch" if name == KEPT else f"no {name}"
        raise StateError(
            f"{folder.path} keeps {missing} (kept: {epochs}); train with train.keep.every=N, or choose best or last"
        )
    for file in chosen:
        if open_checkpoint(file)[2]["recipe_hash"] != info["recipe_hash"]:
            raise StateError(f"{file} belongs to another run; remove it or train again")
    return chosen


def epoch_of(file: Path) -> int | None:
    """Which epoch a file of a kept epoch is of."""
    match = EPOCH.fullmatch(file.stem)
    return int(match[1]) if match else None
