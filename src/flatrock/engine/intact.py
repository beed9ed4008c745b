"""Which of a run's weights can be read: files are damaged while they lie there, and nothing else looks at all of them.

Of epochs that were kept there may be hundreds; they are looked at when they are asked for.
"""

from __future__ import annotations

from pathlib import Path

from flatrock.core.errors import StateError
from flatrock.core.runs import Run
from flatrock.core.tensorfile import load
from flatrock.engine.folder import RunFolder

# In the order in which one stands in for another.
ROLES = ("average-best", "best", "average-last", "last")
# How `load` ends about a file that is damaged; who knows the run says which other ones there are.
ANOTHER = "; use another checkpoint of the run"


def faults(run: Run) -> dict[str, str]:
    """What is wrong with a run's weights, by what `which` calls them; `last` may have been deleted."""
    there = {"best": run.best, "average-best": run.best_average}
    found = {}
    for role in ROLES:
        file = run.folder / f"{role}.safetensors"
        if there.get(role) is not None and not file.is_file():
            found[role] = f"{file} is lost"
        elif file.is_file() and (fault := _fault(run.folder, role)):
            found[role] = fault
    return found


def whole(folder: RunFolder, *, but: str = "") -> list[str]:
    """The checkpoints of a run that can be read, other than one."""
    there = [role for role in ROLES if role != but and (folder.path / f"{role}.safetensors").is_file()]
    return [role for role in there if not _fault(folder.path, role)]


def instead(folder: RunFolder, *, but: str = "") -> str:
    """What can be done about a checkpoint that cannot be read."""
    others = whole(folder, but=but)
    if not others:
        return "no other checkpoint of the run is whole: put the file back from a copy, or train again with --overwrite"
    choice = " or ".join(f"--which {name}" for name in others)
    return f"use another checkpoint of the run, {choice} (in Python: which={others[0]!r}), or a copy of the file"


def _fault(path: Path, role: str) -> str:
    try:
        load(path / f"{role}.safetensors", role=role)
    except StateError as error:
        return str(error).removesuffix(ANOTHER)
    return ""
