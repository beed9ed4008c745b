"""Train one recipe on several devices: a process on each, all of them watched over from here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch

from flatrock.core.errors import ConfigError, FlatrockError, StateError, TrainingError, in_words
from flatrock.core.progress import Progress, Silent
from flatrock.core.records import Run
from flatrock.core.team import LostError, joined
from flatrock.data.catalog import load_data
from flatrock.engine.folder import RunFolder
from flatrock.engine.follow import follow
from flatrock.engine.loop import train
from flatrock.recipes.build import build_job
from flatrock.recipes.pieces import DEFAULT_RUNS
from flatrock.recipes.schema import Recipe

# Seconds in which processes may tell why they ended after one has failed.
LAST_WORDS = 15.0


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What every process is told."""

    recipe: Recipe
    devices: tuple[torch.device, ...]
    folder: Path
    data_folder: Path | None
    resume: bool
    overwrite: bool
    heard: bool
    threads: int
    meeting: Path


@dataclass(frozen=True, eq=False)
class Member:
    """A process on its device, and the line on which it tells how it goes."""

    device: torch.device
    process: BaseProcess
    line: Connection

    def told(self) -> tuple[str, Any]:
        """What it says next: ("progress", a call), ("done", None) or ("failed", an error)."""
        try:
            return self.line.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            cure = "for want of memory? The run goes on from its last saved state with --resume (resume=True)"
            return "failed", StateError(f"the process on {self.device} has ended (exit code {code}), {cure}")


def train_together(
    recipe: Recipe,
    devices: Sequence[torch.device],
    *,
    folder: Path | None = None,
    data_folder: Path | None = None,
    download: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Train on all devices: each has the whole network and its part of every batch; gradients are averaged."""
    _check(recipe, devices)
    if download:  # once, not by every process
        how: dict[str, Any] = {"folder": data_folder, "progress": progress or Silent(), **recipe.data.options}
        load_data(recipe.data.name, "train", download=True, **how)
    place = folder or DEFAULT_RUNS / recipe.name
    with TemporaryDirectory(prefix="flatrock-") as rendezvous:
        orders = Orders(
            recipe=recipe,
            devices=tuple(devices),
            folder=place,
            data_folder=data_folder,
            resume=resume,
            overwrite=overwrite,
            heard=progress is not None,
            threads=max(1, torch.get_num_threads() // len(devices)),
            meeting=Path(rendezvous) / "meeting",
        )
        members: list[Member] = []
        try:
            for rank in range(len(devices)):
                members.append(_begun(orders, rank))
            _watch(members, progress or Silent())
        finally:
            for member in members:
                member.process.terminate()
                member.process.join()
                member.line.close()
    return RunFolder(place).run()


def _check(recipe: Recipe, devices: Sequence[torch.device]) -> None:
    """ConfigError with everything that speaks against these devices."""
    faults = []
    if len({device.type for device in devices}) > 1:
        faults.append(f"devices: got {', '.join(map(str, devices))}; name devices of one kind")
    if recipe.train.batch_size < 2 * len(devices):
        faults.append(f"train.batch_size: {recipe.train.batch_size} leaves less than two samples for a device")
    if recipe.data.augment.mixup:
        faults.append("data.augment.mixup: samples are mixed with others of the whole batch; train on one device")
    if faults:
        raise ConfigError(f"recipe {recipe.name} cannot be trained on {len(devices)} devices:", tuple(faults))


def _begun(orders: Orders, rank: int) -> Member:
    """A process that was not forked: one that has used a GPU cannot be."""
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(there, orders, rank), daemon=True)
    process.start()
    there.close()
    return Member(orders.devices[rank], process, here)


def _watch(members: Sequence[Member], progress: Progress) -> None:
    """Until all are done, or one has failed and the others had their time to tell why; that is raised."""
    leader, at_work = members[0], list(members)
    failures: dict[Member, Exception] = {}
    deadline: float | None = None
    while at_work and not _clear(failures, leader):
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([member.line for member in at_work], patience)
        if not ready:
            break
        for member in [m for m in at_work if m.line in ready]:
            kind, content = member.told()
            if kind == "progress":
                getattr(progress, content[0])(*content[1])
                continue
            at_work.remove(member)
            if kind == "failed":
                failures[member] = content
                deadline = deadline or time.monotonic() + LAST_WORDS
    if failures:
        raise _cause(failures, leader)


def _clear(failures: Mapping[Member, Exception], leader: Member) -> bool:
    """Whether it is known why a training ended, and the leader, which writes into the run folder, has told its part."""
    return leader in failures and not isinstance(_cause(failures, leader), LostError)


def _cause(failures: Mapping[Member, Exception], leader: Member) -> Exception:
    """The leader's word before that of others, but not that others are gone."""
    told = sorted(failures.items(), key=lambda item: (isinstance(item[1], LostError), item[0] is not leader))
    return told[0][1]


class _Relay:
    """Tells the process that watches what a listener is told."""

    def __init__(self, line: Connection) -> None:
        self._line = line

    def begin(self, task: str, total: int, done: int = 0) -> None:
        """Pass on."""
        self._line.send(("progress", ("begin", (task, total, done))))

    def advance(self, units: int, note: str = "") -> None:
        """Pass on."""
        self._line.send(("progress", ("advance", (units, note))))

    def end(self) -> None:
        """Pass on."""
        self._line.send(("progress", ("end", ())))

    def say(self, text: str) -> None:
        """Pass on."""
        self._line.send(("progress", ("say", (text,))))


def _train(line: Connection, orders: Orders, rank: int) -> None:
    """The life of a process: the first one leads, and is the only one that writes and is heard."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that watches
    Thread(target=_end_with_the_watcher, daemon=True).start()
    torch.set_num_threads(orders.threads)
    listener = _Relay(line) if orders.heard and rank == 0 else None
    try:
        with joined(rank, orders.devices, orders.meeting) as team:
            job = build_job(
                orders.recipe,
                folder=orders.folder,
                data_folder=orders.data_folder,
                device=orders.devices[rank],
                resume=orders.resume,
                team=team,
                progress=listener,
            )
            if rank == 0:
                train(job, resume=orders.resume, overwrite=orders.overwrite, progress=listener)
            else:
                follow(job)
        line.send(("done", None))
    except Exception as error:
        with suppress(OSError):
            line.send(("failed", _portable(error, orders.devices[rank])))


def _end_with_the_watcher() -> None:
    """However it ends: nobody is left behind that trains on and holds the run folder."""
    watcher = parent_process()
    assert watcher is not None
    wait([watcher.sentinel])
    os._exit(1)


def _portable(error: Exception, device: torch.device) -> Exception:
    """The error as it is if it is ours; others may not be known, or not be picklable, where it is raised."""
    return error if isinstance(error, FlatrockError) else TrainingError(f"on {device}: {in_words(error)}")
