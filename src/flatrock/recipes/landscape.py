"""Run -> landscape: measure one around a checkpoint, resumably, and store it beside the checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatrock.attacks.catalog import describe
from flatrock.core.errors import ConfigError
from flatrock.core.files import json_text, write_atomic
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import VERSION, birth_certificate
from flatrock.core.rng import Seed
from flatrock.core.tensorfile import digest, weights_digest
from flatrock.core.threat import Threat
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset
from flatrock.diagnostics.grid import Axis
from flatrock.diagnostics.input_landscape import walk_inputs
from flatrock.diagnostics.landscape import moved
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.probe import Probe
from flatrock.diagnostics.surface import Array, Landscape
from flatrock.diagnostics.weight_landscape import MIDDLE, place, walk_weights, weight_points
from flatrock.models.classifier import Classifier
from flatrock.recipes.build import build_threat, check_fit
from flatrock.recipes.check import validate
from flatrock.recipes.landscape_plan import Plan
from flatrock.recipes.part import check_classes, data_part
from flatrock.recipes.restore import facts, open_checkpoint, restored
from flatrock.recipes.schema import Recipe

# Samples attacked together unless told otherwise; halved when memory does not hold them.
CPU_BATCH, GPU_BATCH = 256, 2048


@dataclass(frozen=True)
class Subject:
    """A checkpoint ready to be looked at: its network on the device, the samples, and the grid."""

    path: Path
    model: Classifier
    recipe: Recipe
    facts: dict[str, Any]
    threat: Threat
    data: Dataset
    whole: int
    axis: Axis
    device: torch.device

    @property
    def run(self) -> str:
        """The name of the run's folder, however it was written."""
        return self.path.resolve().parent.name

    @property
    def x(self) -> Tensor:
        """The inputs on the device."""
        return self.data.images(torch.arange(len(self.data))).to(self.device)


def measure_landscape(
    checkpoint: Path,
    plan: Plan,
    *,
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    resume: bool = False,
    progress: Progress | None = None,
) -> tuple[Landscape, Path]:
    """The landscape around a checkpoint (or its epoch's images), and the file it is stored in.

    Every finished point is on disk; with `resume` a measurement goes on from there, and a finished one is read.
    """
    listener = progress or Silent()
    subject = _subject(checkpoint, plan, data_folder, torch.device(device))
    target, part = (checkpoint.with_name(f"{plan.stem(checkpoint.stem)}.{end}") for end in ("json", "part"))
    half = plan.precision == "half" or (plan.precision == "auto" and subject.device.type == "cuda")
    size = plan.batch_size or (GPU_BATCH if subject.device.type == "cuda" else CPU_BATCH)
    identity = _identity(subject, plan, size, half=half and plan.kind != "input")
    if resume and target.is_file():
        known = Landscape.from_file(target)
        if known.identity == json.loads(json_text(identity)):
            part.unlink(missing_ok=True)  # of a repetition that was stopped
            return known, target
    ledger = Ledger(part, identity, resume=resume)
    begun, before = time.monotonic(), len(ledger)
    total = _units(subject, plan)
    listener.begin(f"{plan.kind} landscape of {subject.run}/{checkpoint.stem}", total, before)
    try:
        found = _walked(subject, plan, ledger, listener, size, half=half)
    finally:
        listener.end()
    about = {"seconds": round(time.monotonic() - begun, 3), "measured": total - before, "points": total}
    record = _certified(found, subject, plan, identity, about)
    write_atomic(target, record.to_json().encode())
    ledger.close()
    return record, target


def _subject(checkpoint: Path, plan: Plan, folder: Path | None, device: torch.device) -> Subject:
    path, tensors, meta = open_checkpoint(checkpoint)
    model, recipe = restored(path, tensors, meta)
    whole = data_part(recipe, plan.on or "", folder)
    check_fit(model, whole)
    check_classes(whole, meta)
    data = _samples_of(whole, plan)
    threat = build_threat(recipe)
    model.to(device)
    if device.type == "cuda" and len(model.input_shape) == 3:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    axis = plan.axis(threat, whole.x[0].numel())
    return Subject(path, model, recipe, facts(path, recipe, meta), threat, data, len(whole), axis, device)


def _samples_of(whole: Dataset, plan: Plan) -> Dataset:
    return fair_subset(whole, plan.images) if plan.ids is None else _chosen(whole, plan.ids)


def _said(plan: Plan, data: Dataset, whole: int) -> str:
    """Which samples these are, in words."""
    return f"{data.name} {(plan.on or '').replace('_', '-')}, {len(data)} of {whole} samples"


def _fingerprint(data: Dataset) -> str:
    x = data.images(torch.arange(len(data)))
    return digest({"x": x.cpu().contiguous(), "y": data.y.cpu()}, "")


def check_comparable(
    files: Sequence[Path], plan: Plan, *, stored: Sequence[Landscape] = (), data_folder: Path | None = None
) -> None:
    """ConfigError if landscapes of these checkpoints could not be drawn together, told before any is measured.

    Threats and samples follow from the recipes; `stored` are landscapes to be drawn beside them.
    """
    opened = {meta["recipe_hash"]: (path, meta) for path, _, meta in map(open_checkpoint, files)}
    recipes = {path: validate(meta["recipe"], f"the recipe stored in {path}") for path, meta in opened.values()}
    if len(recipes) + len(stored) < 2:
        return
    threats = [(str(path), build_threat(recipe)) for path, recipe in recipes.items()]
    told = [(at, f"{t.norm} eps {t.eps:.6g}") for at, t in threats]
    _agree("threat", told + [(_name(r), f"{r.threat['norm']} eps {r.threat['eps']:.6g}") for r in stored])
    samples: dict[str, str] = {}
    for recipe in recipes.values():
        if repr(recipe.data) not in samples:
            whole = data_part(recipe, plan.on or "", data_folder)
            data = _samples_of(whole, plan)
            samples[repr(recipe.data)] = f"{_said(plan, data, len(whole))} ({_fingerprint(data)[:8]})"
    told = [(str(path), samples[repr(recipe.data)]) for path, recipe in recipes.items()]
    _agree("data", told + [(_name(r), f"{r.provenance['data']} ({str(r.identity['data'])[:8]})") for r in stored])


def _name(record: Landscape) -> str:
    return f"record of {record.provenance['run']}"


def _agree(what: str, told: Sequence[tuple[str, str]]) -> None:
    (first, mine), *others = told
    for other, theirs in others:
        if theirs != mine:
            raise ConfigError(
                f"landscapes of different {what} are not drawn at one scale: {mine} ({first}) and {theirs} ({other}); "
                "look at them one by one"
            )


def _chosen(data: Dataset, ids: Sequence[int]) -> Dataset:
    """The samples with these ids, in this order."""
    place_of = {int(i): at for at, i in enumerate(data.ids.tolist())}
    missing = [i for i in ids if i not in place_of]
    if missing or not ids:
        few = ", ".join(map(str, sorted(place_of)[:3]))
        raise ConfigError(f"{data.name!r} has no samples {missing} here; ids are such as {few} up to {max(place_of)}")
    return data.subset(torch.tensor([place_of[i] for i in ids]))


def _identity(subject: Subject, plan: Plan, batch_size: int, *, half: bool) -> dict[str, Any]:
    """What must be the same for a measurement to go on."""
    return {
        "model": weights_digest(subject.model),
        "data": _fingerprint(subject.data),
        "plan": plan.described(),
        "axis": list(subject.axis.values),
        "threat": [subject.threat.norm, subject.threat.eps],
        "flatrock": VERSION,
        "batch_size": batch_size,
        "precision": "bfloat16" if half else "float32",
        "device": subject.device.type,
    }


def _units(subject: Subject, plan: Plan) -> int:
    """Points of a weight landscape, rows of an input landscape."""
    if plan.kind == "input":
        return len(subject.data) * subject.axis.points
    return weight_points(subject.axis, count=plan.directions or 1, dimensions=plan.dimensions)


def _walked(
    subject: Subject, plan: Plan, ledger: Ledger, progress: Progress, batch_size: int, *, half: bool
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
        half=half,
    )
    count = plan.directions or 1
    walk_weights(
        model, probe, subject.axis, count=count, dimensions=plan.dimensions, seed=seed, ledger=ledger, progress=progress
    )
    return {
        "values": _weight_values(ledger, count, plan.dimensions, subject.axis),
        "attack": {} if attack is None else {"name": plan.attack, **describe(attack, subject.threat)},
        "moved": moved(model),
    }


def _weight_values(ledger: Ledger, count: int, dimensions: int, axis: Axis) -> dict[str, Array]:
    shape = (count, *[axis.points] * dimensions)
    values = {name: np.full(shape, np.nan) for name in ledger[MIDDLE]}
    for at in np.ndindex(*shape):
        middle = all(i == axis.middle for i in at[1:])
        reading = ledger[MIDDLE if middle else place(*at)]
        for name, array in values.items():
            array[at] = np.nan if reading[name] is None else reading[name]
    return values


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
        run=subject.run,
        **subject.facts,
        train_seed=subject.recipe.seed,
        data=_said(plan, subject.data, subject.whole),
        precision=identity["precision"],
        batch_size=identity["batch_size"],
        **about,
    )
    return Landscape(
        kind=plan.kind,
        axis=subject.axis.values,
        threat={"norm": subject.threat.norm, "eps": subject.threat.eps},
        identity=identity,
        marks=subject.model.marks,
        provenance=certificate,
        **found,
    )
