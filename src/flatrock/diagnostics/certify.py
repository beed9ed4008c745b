"""CERTIFY for any network and its inputs: vote on every sample, keep what is finished, put it together."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.craft import answered, asked, check_ids, check_inputs, check_model
from flatrock.core.borrow import borrowed, exclusive, full_precision, home, placed
from flatrock.core.device import Devices, alike_devices, shared_by
from flatrock.core.errors import ConfigError, ModelError, ThreatError
from flatrock.core.progress import Progress, Silent
from flatrock.core.rng import Seed
from flatrock.core.rounding import gap
from flatrock.core.threat import L2
from flatrock.core.workers import Work, parcel, pickled, workers
from flatrock.diagnostics.certificate import Certificate
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.smoothing import Smoothing, Voter, noise

# Noisy copies that pass the network together unless told otherwise; halved when memory does not hold them.
CPU_BATCH, GPU_BATCH = 256, 8192
# Noisy copies that pass alone and together first, and how far answers may then lie apart, relative to the widest lead:
# ten times what is rounding elsewhere, as this is no doubt but a refusal.
FEW, COUPLED = 8, 1e-3


def certify(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    smoothing: Smoothing,
    *,
    ids: Tensor | None = None,
    device: Devices | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    ledger: Ledger | None = None,
    progress: Progress | None = None,
    marks: tuple[str, ...] = (),
    provenance: Mapping[str, Any] | None = None,
) -> Certificate:
    """Certify any module that maps [0, 1] inputs to logits, smoothed with noise on those inputs.

    Eval mode, float32 without TF32, on the device the model is on unless told; the model is given back untouched. Of
    several devices each certifies some of the samples, in a process of its own. Random numbers belong to the samples'
    ids (their positions, unless given): neither batch size nor interruption nor who certifies them changes them. What
    the `ledger` holds is not computed again.
    """
    x = _checked(model, x, y)
    ids = torch.arange(len(x)) if ids is None else check_ids(ids, len(x))
    devices = [home(model)] if device is None else alike_devices(device)
    voter = Voter(model, smoothing.sigma, _size(batch_size, devices[0]))
    poll = _Poll(voter, smoothing, Seed(seed).child("certify"))
    kept = Ledger(None, {}, resume=False) if ledger is None else ledger  # an empty one is false
    with _lent(model, devices[0], move=device is not None):
        with torch.no_grad():
            answered(model, x[:2].to(devices[0]), y[:2])
        _check_alone(voter, x[0].to(devices[0]), poll.seed.child("check"))
        _vote(poll, dict(zip(ids.tolist(), x, strict=True)), kept, progress, devices)
    found = [kept[str(name)] for name in ids.tolist()]
    return Certificate(
        smoothing=smoothing,
        labels=y.cpu(),
        top=torch.tensor([row["top"] for row in found]),
        counts=torch.tensor([row["counts"] for row in found]),
        ids=ids,
        shape=tuple(x.shape[1:]),
        seconds=torch.tensor([row["seconds"] for row in found], dtype=torch.float64),
        marks=marks,
        provenance={**(provenance or {}), "batch_size": voter.batch_size, **shared_by(devices)},
    )


def _check_alone(voter: Voter, x: Tensor, seed: Seed) -> None:
    """ModelError if the model answers noisy copies of x, an input without batch, otherwise together than one by one.

    Its votes would depend on the batch size, and prove nothing. A model that answers at random may be smoothed: it is
    one that does not repeat itself in the same batch either.
    """
    copies = x + voter.sigma * noise(x, 0, FEW, seed)
    with torch.no_grad():
        together, again = voter.model(copies), voter.model(copies)
        alone = torch.cat([asked(voter.model, copy[None]) for copy in copies])
    apart = gap(together, alone)
    if apart > COUPLED and gap(together, again) == 0:
        raise ModelError(
            "the model's answer to an input depends on the other inputs of its batch (leads over other classes differ "
            f"by {100 * apart:.2g} % of the widest), so its votes prove nothing; take nothing from the batch in eval "
            "mode, neither mean nor statistics (BatchNorm with track_running_stats=True) nor a scale (dynamic "
            "quantization)"
        )


Told = Callable[[int], None]
Row = dict[str, Any]


@dataclass(frozen=True)
class _Poll:
    """Who votes, and what is asked about a sample."""

    voter: Voter
    smoothing: Smoothing
    seed: Seed

    def row(self, x: Tensor, name: int, told: Told) -> Row:
        """The class that n0 votes chose for the sample of this id, and n fresh votes by class; told of draws done."""
        begun = time.perf_counter()
        chosen = int(self.voter.votes(x, self.smoothing.n0, self.seed.child("choose", name), told).argmax())
        counts = self.voter.votes(x, self.smoothing.n, self.seed.child("count", name), told)
        return {"top": chosen, "counts": counts.tolist(), "seconds": round(time.perf_counter() - begun, 6)}


def _vote(
    poll: _Poll, x: Mapping[int, Tensor], ledger: Ledger, progress: Progress | None, devices: Sequence[torch.device]
) -> None:
    """Fill the ledger with the votes on every sample, by its id."""
    listener, draws = progress or Silent(), poll.smoothing.n0 + poll.smoothing.n
    missing = [name for name in x if ledger.get(str(name)) is None]
    done = len(x) - len(missing)
    listener.begin("certifying", draws * len(x), draws * done)

    def told(count: int) -> None:
        listener.advance(count, f"sample {done + 1} of {len(x)}")

    samples, sharing = [(x[name], name) for name in missing], devices[: len(missing)]
    made = _together(poll, samples, sharing, told) if len(sharing) > 1 else _alone(poll, samples, devices[0], told)
    with closing(made):
        for place, row in made:
            ledger.put(str(missing[place]), row)
            done += 1
    listener.end()


Sample = tuple[Tensor, int]
Rows = Generator[tuple[int, Row], None, None]


def _alone(poll: _Poll, samples: Sequence[Sample], device: torch.device, told: Told) -> Rows:
    """Samples by their place, one after the other."""
    for place, (x, name) in enumerate(samples):
        yield place, poll.row(x.to(device), name, told)


def _together(poll: _Poll, samples: Sequence[Sample], devices: Sequence[torch.device], told: Told) -> Rows:
    """The same from a process on each device, as they come."""
    with placed(poll.voter.model, torch.device("cpu")):
        orders = pickled(poll)
    tasks = ((parcel(x), name) for x, name in samples)
    with workers(_voting, orders, devices) as at_work:
        for place, (row, size) in at_work.answers(tasks, told):
            poll.voter.batch_size = min(poll.voter.batch_size, size)
            yield place, row


@contextmanager
def _voting(poll: _Poll, device: torch.device) -> Iterator[tuple[None, Work]]:
    """In such a process: how a sample is voted on."""

    def vote(sample: Sample, tell: Told) -> tuple[Row, int]:
        x, name = sample
        return poll.row(x.to(device), name, tell), poll.voter.batch_size

    with _lent(poll.voter.model, device, move=True):
        yield None, vote


@contextmanager
def _lent(model: nn.Module, device: torch.device, *, move: bool) -> Iterator[None]:
    """The model as voters need it, moved to this device or already there."""
    moved = placed(model, device) if move else nullcontext()
    with exclusive(model), moved, borrowed(model, device), full_precision(device):
        yield


def _size(batch_size: int | None, device: torch.device) -> int:
    if batch_size is None:
        return GPU_BATCH if device.type == "cuda" else CPU_BATCH
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size!r}")
    return batch_size


def _checked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The inputs; refuse what cannot be certified before any vote."""
    x = check_inputs(x, y, L2(0.0))
    if x.shape[0] == 0:
        raise ThreatError("there is nothing to certify: x has no samples")
    check_model(model, x)
    return x
