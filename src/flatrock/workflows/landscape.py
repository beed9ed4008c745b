"""Trained network -> landscape: measure one around a checkpoint or a model that is no run, resumably, and store it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import describe
from flatrock.core.device import Devices, shared_by
from flatrock.core.errors import ModelError
from flatrock.core.files import json_text, write_atomic
from flatrock.core.identity import ANSWERS, differences
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import VERSION, birth_certificate
from flatrock.core.rng import Seed
from flatrock.core.threat import Threat
from flatrock.data.dataset import Dataset
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.input_landscape import walk_inputs
from flatrock.diagnostics.landscape import moved
from flatrock.diagnostics.ledger import Ledger, forget, measuring
from flatrock.diagnostics.probe import Probe
from flatrock.diagnostics.surface import Array, Landscape
from flatrock.diagnostics.weight_landscape import walk_weights, weight_points, weight_values
from flatrock.workflows.foreign_model import ForeignModel
from flatrock.workflows.landscape_plan import Plan, fingerprint
from flatrock.workflows.trained import Trained, check_replaced, open_trained, said, stored, tell_replaced

# Samples attacked together unless told otherwise; halved when memory does not hold them.
CPU_BATCH, GPU_BATCH = 256, 2048


@dataclass(frozen=True)
class Subject:
    """A network ready to be looked at: it is on the device, with the samples, and the grid."""

    trained: Trained
    model: nn.Module
    threat: Threat
    data: Dataset
    whole: int
    axis: Axis
    device: torch.device
    known_by: dict[str, Any]

    @property
    def x(self) -> Tensor:
        """The inputs on the device."""
        return self.data.images(torch.arange(len(self.data))).to(self.device)


def measure_landscape(
    source: Path | ForeignModel,
    plan: Plan,
    *,
    folder: Path = Path(),
    data_folder: Path | None = None,
    device: Devices = "cpu",
    resume: bool = False,
    progress: Progress | None = None,
) -> tuple[Landscape, Path]:
    """The landscape around a checkpoint or a model that is no run (or around images), and the file it is stored in.

    That lies beside the checkpoint, or in `folder`. Every finished point is on disk; with `resume` a measurement goes
    on from there, and a finished one is read. Several devices share the points of a weight landscape.
    """
    listener, devices = progress or Silent(), plan.devices(device)
    subject = _subject(_opened(source, plan, folder, data_folder, listener), plan, devices[0])
    trained = subject.trained
    target, part = (trained.folder / f"{plan.stem(trained.stem)}.{end}" for end in ("json", "part"))
    size = plan.batch_size or (GPU_BATCH if subject.device.type == "cuda" else CPU_BATCH)
    identity = _identity(subject, plan, size)
    known = stored(target, Landscape.from_file, must=resume)
    odd = [] if known is None else differences(json_text(dict(known.identity)), identity)
    if resume and known is not None:
        if not odd:
            forget(part)
            listener.say(f"read {target}, which was measured before")
            return known, target
        check_replaced(trained, target, odd, identity=identity)
    with measuring(part, identity, resume=resume) as ledger:
        begun, before = time.monotonic(), len(ledger)
        total = _units(subject, plan)
        listener.begin(f"{plan.kind} landscape of {trained.title}", total, before)
        try:
            found = _walked(subject, plan, ledger, listener, size, devices=devices)
        finally:
            listener.end()
        taken = round(time.monotonic() - begun, 3)
        about: dict[str, Any] = {"seconds": taken, "measured": total - before, "points": total}
        record = _certified(found, subject, plan, identity, about | shared_by(devices))
        write_atomic(target, record.to_json().encode())
        ledger.close()
    listener.say(f"wrote {target}")
    tell_replaced(odd, listener)
    return record, target


def _opened(
    source: Path | ForeignModel, plan: Plan, folder: Path, data_folder: Path | None, progress: Progress
) -> Trained:
    return open_trained(
        source, what="measurement", on=str(plan.on), folder=folder, data_folder=data_folder, progress=progress
    )


def _subject(trained: Trained, plan: Plan, device: torch.device) -> Subject:
    whole = trained.part(str(plan.on))
    known_by = trained.examine(whole, device)
    if ANSWERS in known_by and known_by[ANSWERS] is None:
        raise ModelError(f"{trained.name} answers at random: its loss is no landscape; switch its randomness off")
    data, threat, model = plan.samples(whole), trained.threatened, trained.model.to(device)
    # Networks of others may not bear another layout: some reshape what their convolutions return.
    if device.type == "cuda" and len(whole.input_shape) == 3 and trained.recipe is not None:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    axis = plan.axis(threat, torch.Size(whole.input_shape).numel())
    return Subject(trained, model, threat, data, len(whole), axis, device, known_by)


def _identity(subject: Subject, plan: Plan, batch_size: int) -> dict[str, Any]:
    """What must be the same for a measurement to go on; of an attack of the user's also its code, and what it holds."""
    attack = plan.made_attack()
    told = {} if attack is None else describe(attack, subject.threat)
    return {
        "model": subject.trained.digest,
        **subject.known_by,
        "data": fingerprint(subject.data),
        "plan": plan.described(),
        **{key: told[key] for key in ("code", "holds") if key in told},
        "axis": list(subject.axis.values),
        "threat": [subject.threat.norm, subject.threat.eps],
        "flatrock": VERSION,
        "batch_size": batch_size,
        "precision": plan.computes_in(subject.device),
        "device": subject.device.type,
    }


def _units(subject: Subject, plan: Plan) -> int:
    """Points of a weight landscape, rows of an input landscape."""
    if plan.kind == "input":
        return len(subject.data) * subject.axis.points
    return weight_points(subject.axis, count=plan.directions or 1, dimensions=plan.dimensions)


def _walked(
    subject: Subject,
    plan: Plan,
    ledger: Ledger,
    progress: Progress,
    batch_size: int,
    *,
    devices: Sequence[torch.device],
) -> dict[str, Any]:
    """Measure what is missing; the values, and what a reader must know beside them."""
    model, y, ids = subject.model, subject.data.y.to(subject.device), subject.data.ids.to(subject.device)
    seed = Seed(plan.seed).child("landscape")
    if plan.kind == "input":
        gen = seed.child("signs").samples(ids)
        walk_inputs(model, subject.x, y, subject.axis, gen=gen, batch_size=batch_size, ledger=ledger, progress=progress)
        return {"values": _input_values(ledger, len(y), subject.axis), "samples": _samples(subject.data)}
    attack = plan.made_attack()
    probe = Probe(
        model,
        subject.x,
        y,
        ids=ids,
        threat=subject.threat,
        attack=attack,
        seed=seed.child("attack"),
        batch_size=batch_size,
        half=plan.computes_in(subject.device) == "bfloat16",
    )
    count = plan.directions or 1
    how: dict[str, Any] = {"ledger": ledger, "progress": progress, "devices": devices}
    walk_weights(model, probe, subject.axis, count=count, dimensions=plan.dimensions, seed=seed, **how)
    return {
        "values": weight_values(ledger, subject.axis, count=count, dimensions=plan.dimensions),
        "attack": {} if attack is None else {"name": plan.attack, **describe(attack, subject.threat)},
        "moved": moved(model),
    }


def _input_values(ledger: Ledger, count: int, axis: Axis) -> dict[str, Array]:
    rows = [[ledger[f"{k}/{i}"] for i in range(axis.points)] for k in range(count)]
    names = ("loss", "accuracy", "margin")
    return {name: np.array([[row[name] for row in image] for image in rows], dtype=np.float64) for name in names}


def _samples(data: Dataset) -> tuple[dict[str, Any], ...]:
    """Which images these are."""
    names = data.class_names or tuple(map(str, range(data.num_classes)))
    return tuple({"id": i, "class": names[label]} for i, label in zip(data.ids.tolist(), data.y.tolist(), strict=True))


def _certified(
    found: dict[str, Any], subject: Subject, plan: Plan, identity: dict[str, Any], about: dict[str, Any]
) -> Landscape:
    """The record with its birth certificate."""
    certificate = birth_certificate(
        device=subject.device,
        seed=plan.seed,
        **subject.trained.about,
        data=said(str(plan.on), subject.data, subject.whole),
        precision=identity["precision"],
        batch_size=identity["batch_size"],
        **about,
    )
    return Landscape(
        kind=plan.kind,
        axis=subject.axis.values,
        threat={"norm": subject.threat.norm, "eps": subject.threat.eps},
        identity=identity,
        marks=subject.trained.marks,
        provenance=certificate,
        **found,
    )
