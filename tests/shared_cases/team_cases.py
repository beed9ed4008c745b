"""Short runs of several processes, and of one."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.team import ALONE, Team, joined, leave
from flatrock.engine.checkpoint import model_tensors
from flatrock.engine.follow import follow
from flatrock.engine.loop import train
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe

# Without BatchNorm, which sees the part of a batch that is on its device, parts make up the whole.
PLAIN = "model={name: 'team_nets:mlp', hidden: 32}"
FEW = ("train.max_steps=4", "train.epochs=1", "select.size=16", "train.tensorboard=false")


@contextmanager
def among_nets(folder: Path) -> Iterator[None]:
    """In a folder with team_nets.py: recipes name networks of the current folder only."""
    shutil.copy(Path(__file__).with_name("team_nets.py"), folder)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.modules.pop("team_nets", None)


def trained(words: list[str], folder: Path, team: Team) -> dict[str, Any]:
    """Weights, averages, records and momentum after the run of a recipe in this process."""
    job = build_job(load_recipe(words[0], [*words[1:], *FEW]), folder=folder, team=team)
    if team.rank == 0:
        train(job)
    else:
        follow(job)
    tensors = {name: tensor.clone() for name, tensor in model_tensors(job.model).items()}
    averages = {} if job.averaging is None else {f"average/{k}": v.clone() for k, v in job.averaging.average().items()}
    return tensors | averages


def member(rank: int, size: int, meeting: Path, cases: dict[str, list[str]], folder: Path) -> None:
    """One of several processes: all cases, one after the other; what became of them is left in a file."""
    torch.set_num_threads(1)
    with joined(rank, [torch.device("cpu")] * size, meeting) as team:
        found = {name: trained(words, folder / name, team) for name, words in cases.items()}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    leave(0)


def in_processes(size: int, cases: dict[str, list[str]], folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """What each of `size` processes holds after the cases."""
    context = get_context("spawn")
    words = [(rank, size, folder / "meeting", cases, folder) for rank in range(size)]
    members = [context.Process(target=member, args=args, daemon=True) for args in words]
    for process in members:
        process.start()
    for process in members:
        process.join(120)
    codes = [process.exitcode for process in members]
    for process in members:  # one waits for ever for another that has ended
        process.terminate()
    assert codes == [0] * size
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def in_one(cases: dict[str, list[str]], folder: Path) -> dict[str, dict[str, Tensor]]:
    """The same here, alone."""
    return {name: trained(words, folder / name, ALONE) for name, words in cases.items()}
