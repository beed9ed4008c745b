"""Processes that train one network together, each on its part of every batch; alone, all of this does nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flatrock.core.device import memory_is_short
from flatrock.core.errors import StateError, TrainingError, in_words

T = TypeVar("T")
# Nobody gives up by the clock: who waits for a process that has ended is ended by the one that watches over all.
PATIENCE = timedelta(days=30)


class LostError(StateError):
    """Another process of the team is gone."""


@contextmanager
def _all_there() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if memory_is_short(error):
            raise
        raise LostError(
            f"another process of this training has ended ({in_words(error)}); go on from the last saved state with "
            "--resume (resume=True)"
        ) from error


@dataclass(frozen=True)
class Team:
    """One of `size` processes, counted from 0; the first one leads. What they do together, all of them must call."""

    rank: int = 0
    size: int = 1
    _agreed: list[str] = field(default_factory=list, compare=False, repr=False)

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.size == 1

    def part(self, rows: Tensor) -> Tensor:
        """This process's rows: neighbours, as many as the others have, or one more."""
        return rows.tensor_split(self.size)[self.rank]

    def rows(self, count: int) -> int:
        """How many of so many rows are this process's."""
        return len(self.part(torch.arange(count)))

    def mean_(self, tensors: Sequence[Tensor], share: float) -> None:
        """Replace each tensor, in place, by sum_r share_r * tensor_r over all processes; shares add up to 1."""
        if self.alone or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).mul_(share)
        with _all_there():
            dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(list(tensors), [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])

    def mean_found(
        self, found: Mapping[str, Tensor | None], like: Mapping[str, Tensor], share: float, also: Sequence[Tensor] = ()
    ) -> dict[str, Tensor]:
        """mean_ of what was found by name, and of `also`; those that any process has found, shaped as in `like`.

        Who has not found one has zeros of it. What others have found is told along with the numbers, so all send as
        many, and only who misses something reads that (a wait for a GPU): who misses nothing knows that all are there.
        """
        if self.alone:
            return {name: tensor for name, tensor in found.items() if tensor is not None}
        here = {name: torch.zeros_like(like[name]) if tensor is None else tensor for name, tensor in found.items()}
        missed = [name for name, tensor in found.items() if tensor is None]
        device = next(iter(like.values())).device
        marks = torch.ones(len(here), device=device)
        if missed:
            marks = torch.tensor([float(tensor is not None) for tensor in found.values()], device=device)
        self.mean_([*here.values(), marks, *also], share)
        if not missed:
            return here
        return {name: tensor for (name, tensor), mark in zip(here.items(), marks.tolist(), strict=True) if mark > 0}

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.alone:
            return tensor
        found = tensor.clone()
        with _all_there():
            dist.all_reduce(found)
        return found

    def told(self, value: T) -> T:
        """What the leader says; who follows is not heard."""
        if self.alone:
            return value
        box = [value]
        with _all_there():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def check_alike(self, tensors: Mapping[str, Tensor]) -> None:
        """TrainingError unless all processes hold the same numbers, as far as their sums tell (a wait for a GPU).

        Numbers that are not finite are told of elsewhere, and are no difference.
        """
        if self.alone:
            return
        sums = torch.stack([tensor.detach().double().sum() for tensor in tensors.values()]).nan_to_num()
        least, most = sums.clone(), sums.clone()
        with _all_there():
            dist.all_reduce(least, op=dist.ReduceOp.MIN)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        odd = [name for name, low, high in zip(tensors, least.tolist(), most.tolist(), strict=True) if low != high]
        if odd:
            raise TrainingError(
                f"{odd[0]} is not the same on all devices ({len(odd)} such tensors): of what a network gathers only "
                "statistics of BatchNorm and InstanceNorm are averaged; train on one device, or on devices of one kind"
            )

    def agreed(self, names: Sequence[str], *, anew: bool) -> list[str]:
        """The parameters that all processes average; this one trains those named. `anew`: all are asked (a wait).

        In between nobody is asked. One that is trained no longer is averaged all the same. A new one is refused:
        others that do not train it would send less, and wait for the rest for ever (TrainingError).
        """
        if self.alone:
            return list(names)
        if anew or not self._agreed:
            self._agreed[:] = self._same(names)
        known = set(self._agreed)
        odd = [name for name in names if name not in known]
        if odd:
            raise TrainingError(
                f"{odd[0]} is trained (requires_grad) in the middle of an epoch and was not at its first step "
                f"({len(odd)} such parameters); begin with that at the first step of an epoch, or train on one device"
            )
        return list(self._agreed)

    def _same(self, names: Sequence[str]) -> Sequence[str]:
        """What all have named; TrainingError if that is not the same."""
        told: list[Sequence[str]] = [[]] * self.size
        with _all_there():
            dist.all_gather_object(told, list(names))
        odd = sorted(set[str]().union(*told) - set[str](told[0]).intersection(*told))
        if odd:
            raise TrainingError(
                f"{odd[0]} is trained (requires_grad) on some devices only ({len(odd)} such parameters); "
                "train on one device"
            )
        return told[0]


ALONE = Team()


@contextmanager
def joined(rank: int, devices: Sequence[torch.device], meeting: Path) -> Iterator[Team]:
    """This process as one of those on the devices; they find each other by a file that is not there before."""
    if devices[rank].type == "cuda":
        torch.cuda.set_device(devices[rank])
    # NCCL refuses two processes on one device, which tests of a single GPU want.
    fast = devices[0].type == "cuda" and len(set(devices)) == len(devices)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if fast else "gloo",
        store=dist.FileStore(str(meeting), len(devices)),  # type: ignore[attr-defined]
        rank=rank,
        world_size=len(devices),
        timeout=PATIENCE,
    )
    yield Team(rank, len(devices))
    dist.destroy_process_group()  # not after an error: the others may be waiting for what does not come any more


def leave(code: int) -> NoReturn:
    """End this process, which was one of a team, without taking Python apart.

    Threads of a process group live on when it is gone; one that lets go of a tensor while Python ends aborts.
    """
    with suppress(OSError, ValueError):  # nobody may listen any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
