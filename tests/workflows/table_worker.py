"""Makes a table in processes that are killed at a rename, the moment at which a file counts.

Arguments: the results file, then numbers of renames. For each a child is forked that kills itself right before (odd
turns) or after it; its exit code, or minus the signal that ended it, is printed. 0: it is not killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from table_cases import NAMES, TINY

from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.workflows.reproduce import reproduce_rows
from flatrock.workflows.reproduce_plan import plan_rows


def die_at(number: int, *, before: bool) -> None:
    rename, calls = Path.replace, 0

    def dying(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == number and before:
            os.kill(os.getpid(), signal.SIGKILL)
        moved = rename(self, target)
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return moved

    Path.replace = dying  # type: ignore[method-assign, assignment]


def main() -> None:
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # what a killed process wrote is safe; only power cuts lose it
    build_job(load_recipe("digits_at"))  # imports what the children will need
    out = Path(sys.argv[1])
    for turn, number in enumerate(map(int, sys.argv[2:])):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_at(number, before=turn % 2 == 1)
                outcome = reproduce_rows(plan_rows(NAMES, TINY, runs_dir=out.parent), out, device="cpu")
                code = len(outcome.problems) + len(outcome.left)
            finally:
                os._exit(code)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")


if __name__ == "__main__":
    main()
