"""Train one recipe on several devices: a process on each, all of them watched over from here."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from flatrock.core.device import kind_fault
from flatrock.core.errors import ConfigError, FlatrockError, StateError, TrainingError
from flatrock.core.processes import begun, end_with_parent, how_it_ended
from flatrock.core.progress import Progress, Silent
from flatrock.core.runs import Run
from flatrock.core.team import LostError, joined, leave
from flatrock.data import pictures
from flatrock.data.augment import MIXING
from flatrock.data.catalog import load_data
from flatrock.data.loader import extra_share
from flatrock.engine.failure import in_short, interrupted, marked, trace_of
from flatrock.engine.folder import RunFolder
from flatrock.engine.follow import follow
from flatrock.engine.loop import OnEpoch, train
from flatrock.engine.told import tell_anew, tell_changed
from flatrock.recipes.build import build_job
from flatrock.recipes.own import origins
from flatrock.recipes.pieces import DEFAULT_RUNS
from flatrock.recipes.schema import Recipe

# Seconds in which processes may tell why they ended after one has failed.
LAST_WORDS = 15.0
# Whether several processes may share a GPU, which is slow: for tests where there is one only.
SHARED_GPU = False


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
    epochs_heard: bool
    threads: int
    meeting: Path


@dataclass(frozen=True, eq=False)
class Member:
    """A process on its device, and the line on which it tells how it goes."""

    device: torch.device
    process: BaseProcess
    line: Connection

    def told(self) -> tuple[str, Any]:
        """What it says next: ("progress", a call), ("epoch", a record), ("done", None) or ("failed", a Failure)."""
        try:
            return self.line.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            how = how_it_ended(self.process, self.device)
            gone = StateError(f"{how}. The run goes on from its last saved state with --resume")
            return "failed", Failure(gone, ended=True)


@dataclass(frozen=True)
class Failure:
    """The error of a process, in words if it is not of ours, and where that came from."""

    error: Exception
    trace: str = ""
    ended: bool = False  # it said nothing, and is gone

    @property
    def lost(self) -> bool:
        """Whether it only says that another process has failed."""
        return isinstance(self.error, LostError)


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
    on_epoch: OnEpoch | None = None,
) -> Run:
    """Train on all devices: each has the whole network and its part of every batch; gradients are averaged."""
    devices = _numbered(devices)
    if faults := device_faults(recipe, devices):
        raise ConfigError(f"recipe {recipe.name} cannot be trained on {len(devices)} devices:", faults)
    if download:  # once, not by every process
        how: dict[str, Any] = {"folder": data_folder, "progress": progress or Silent(), **recipe.data.options}
        load_data(recipe.data.name, "train", download=True, **how)
    place = folder or DEFAULT_RUNS / recipe.name
    if resume and not overwrite and not RunFolder(place).in_use():  # told here: who begins processes is who asked
        tell_anew(RunFolder(place), progress or Silent())
        resume = False
    if resume and not overwrite and not RunFolder(place).ended():
        tell_changed(origins(recipe), RunFolder(place), progress or Silent())
    with TemporaryDirectory(prefix="flatrock-") as rendezvous:
        orders = Orders(
            recipe=recipe,
            devices=tuple(devices),
            folder=place,
            data_folder=data_folder,
            resume=resume,
            overwrite=overwrite,
            heard=progress is not None,
            epochs_heard=on_epoch is not None,
            threads=max(1, torch.get_num_threads() // len(devices)),
            meeting=Path(rendezvous) / "meeting",
        )
        try:
            leader, failures = _together(orders, progress or Silent(), on_epoch)
        except BaseException as error:
            _note_stop(RunFolder(place), error)
            raise
    if failures:
        raise _told(failures, leader, RunFolder(place))
    return RunFolder(place).run()


def _together(orders: Orders, progress: Progress, on_epoch: OnEpoch | None) -> tuple[Member, dict[Member, Failure]]:
    """Who leads, and who failed how; all processes have ended afterwards."""
    members: list[Member] = []
    try:
        for rank, device in enumerate(orders.devices):
            members.append(Member(device, *begun(_train, orders, rank)))
        return members[0], _watched(members, progress, on_epoch)
    finally:
        for member in members:
            member.process.terminate()
            member.process.join()
            member.line.close()


def _note_stop(folder: RunFolder, error: BaseException) -> None:
    """The process that trained was ended in the middle of something, so this one notes why, unless another trains."""
    if folder.info.is_file():
        with suppress(StateError), folder.locked("closing"):
            interrupted(folder, error)


def _numbered(devices: Sequence[torch.device]) -> list[torch.device]:
    """cuda is cuda:0."""
    return [torch.device(one.type, one.index or 0) if one.type == "cuda" else one for one in devices]


def device_faults(recipe: Recipe, devices: Sequence[torch.device]) -> tuple[str, ...]:
    """Everything that speaks against training on these devices together."""
    devices = _numbered(devices)
    if len(devices) == 1:
        return ()
    faults = []
    if fault := kind_fault(devices):
        faults.append(fault)
    if not SHARED_GPU and any(one.type == "cuda" and devices.count(one) > 1 for one in devices):
        faults.append(f"devices: got {', '.join(map(str, devices))}; name each GPU once")
    parts = [recipe.train.batch_size]
    if recipe.data.extra is not None:
        share = extra_share(recipe.train.batch_size, recipe.data.extra.fraction)
        parts = [recipe.train.batch_size - share, share]
    if min(parts) < 2 * len(devices):
        few = f"train.batch_size: {recipe.train.batch_size} leaves one of {len(devices)} devices less than two samples"
        faults.append(f"{few} of a kind; raise it, or name fewer devices")
    for name in [n for n in MIXING if getattr(recipe.data.augment, n)]:
        faults.append(f"data.augment.{name}: samples are mixed with others of the whole batch; train on one device")
    return tuple(faults)


def _watched(members: Sequence[Member], progress: Progress, on_epoch: OnEpoch | None) -> dict[Member, Failure]:
    """Until all are done, or one has failed and the others had their time to tell why: who failed how."""
    leader, at_work = members[0], list(members)
    failures: dict[Member, Failure] = {}
    deadline: float | None = None
    while at_work and not (leader in failures and not _cause(failures, leader)[1].lost):
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([member.line for member in at_work], patience)
        if not ready:
            break
        for member in [m for m in at_work if m.line in ready]:
            kind, content = member.told()
            if kind == "progress":
                getattr(progress, content[0])(*content[1])
                continue
            if kind == "epoch" and on_epoch is not None:
                on_epoch(content)
                continue
            at_work.remove(member)
            if kind == "failed":
                failures[member] = content
                deadline = deadline or time.monotonic() + LAST_WORDS
    return failures


def _cause(failures: Mapping[Member, Failure], leader: Member) -> tuple[Member, Failure]:
    """The leader's word before that of others, but not that others are gone."""
    return min(failures.items(), key=lambda item: (item[1].lost, item[0] is not leader))


def _told(failures: Mapping[Member, Failure], leader: Member, folder: RunFolder) -> Exception:
    """The error to raise; one that the leader, which writes into the run folder, did not have is written there now."""
    member, failure = _cause(failures, leader)
    if failure.ended:
        _note_stop(folder, failure.error)
    if member is leader or not isinstance(failure.error, TrainingError) or not folder.info.is_file():
        return failure.error
    return marked(folder, str(failure.error), trace=failure.trace)


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
    end_with_parent()
    torch.set_num_threads(orders.threads)
    pictures.share_cores(len(orders.devices))
    listener = _Relay(line) if orders.heard and rank == 0 else None
    device = orders.devices[rank]
    try:
        with joined(rank, orders.devices, orders.meeting) as team:
            job = build_job(
                orders.recipe,
                folder=orders.folder,
                data_folder=orders.data_folder,
                device=device,
                resume=orders.resume,
                team=team,
                progress=listener,
            )
            if rank == 0:
                tell = (lambda record: line.send(("epoch", record))) if orders.epochs_heard else None
                train(job, resume=orders.resume, overwrite=orders.overwrite, progress=listener, on_epoch=tell)
            else:
                follow(job)
        line.send(("done", None))
        code = 0
    except Exception as error:
        ours = error if isinstance(error, FlatrockError) else TrainingError(f"on {device}: {in_short(error)}")
        with suppress(OSError):
            line.send(("failed", Failure(ours, trace_of(error))))
        code = 1
    line.close()
    leave(code)
