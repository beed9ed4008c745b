"""Run -> curvature: measure that of a checkpoint and store it beside the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import describe, parse_attack
from flatrock.attacks.craft import craft
from flatrock.core.errors import ConfigError
from flatrock.core.files import json_text, sha256, write_atomic
from flatrock.core.options import choose, count
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import birth_certificate
from flatrock.core.rng import Seed
from flatrock.core.threat import Threat
from flatrock.core.types import Attack
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset
from flatrock.diagnostics.curvature import Curvature, Settings, curvature
from flatrock.diagnostics.curvature_record import ADVERSARIAL, CLEAN, CurvatureRecord
from flatrock.diagnostics.hessian import check_installed
from flatrock.diagnostics.probe import fitting
from flatrock.models.classifier import Classifier
from flatrock.recipes.build import build_threat, check_fit
from flatrock.recipes.part import check_classes, data_part
from flatrock.recipes.restore import facts, open_checkpoint, restored
from flatrock.recipes.schema import Recipe

PRECISIONS = {"single": torch.float32, "double": torch.float64}
# Samples at a time unless told otherwise; halved where memory is short.
BATCH = 250


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """On which samples, under which attack (None = the one the recipe chose epochs with), and in which numbers."""

    on: str = "train"
    images: int = 500
    attack: str | Mapping[str, Any] | None = None
    precision: str = "single"
    batch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        count("curvature", "images", self.images, least=1)
        choose("curvature", "precision", self.precision, PRECISIONS)
        if self.batch_size is not None:
            count("curvature", "batch_size", self.batch_size, least=1)


@dataclass(frozen=True)
class _Subject:
    """A checkpoint ready to be measured: its network and samples on the device, and how they are attacked."""

    path: Path
    model: Classifier
    recipe: Recipe
    facts: dict[str, Any]
    data: Dataset
    whole: int
    threat: Threat
    label: str
    crafted: Crafted


class Crafted:
    """The samples, attacked at whatever weights the model has, always with the same random numbers."""

    def __init__(
        self, attack: Attack, x: Tensor, y: Tensor, ids: Tensor, threat: Threat, seed: Seed, size: int
    ) -> None:
        self.attack, self.x, self.y, self.ids = attack, x, y, ids
        self.threat, self.seed, self.size = threat, seed, size

    def __call__(self, model: nn.Module) -> Tensor:
        """Adversarial inputs of all samples."""
        found, self.size = fitting(lambda size: self._craft(model, size), self.size)
        return found

    def _craft(self, model: nn.Module, size: int) -> Tensor:
        parts = []
        for rows in torch.split(torch.arange(len(self.x), device=self.x.device), size):
            gen = self.seed.samples(self.ids[rows])
            parts.append(craft(self.attack, model, self.x[rows], self.y[rows], self.threat, gen))
        return torch.cat(parts)


def measure_curvature(
    checkpoint: Path,
    sampling: Sampling,
    settings: Settings,
    *,
    beta: float | None = None,
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> tuple[CurvatureRecord, Path]:
    """The curvature of a checkpoint's clean and adversarial cross-entropy, and the file it is stored in.

    `beta` of PAC-Bayes is the number of training samples, unless told otherwise.
    """
    check_installed()
    subject = _subject(checkpoint, sampling, data_folder, torch.device(device))
    plan = _plan(subject, sampling, settings, beta, data_folder)
    crafted = subject.crafted

    def measured(loss: str, x: Tensor) -> Curvature:
        return curvature(
            subject.model,
            x,
            crafted.y,
            beta=plan.settings["beta"],
            settings=settings,
            attack=crafted if loss == ADVERSARIAL else None,
            batch_size=crafted.size,
            seed=Seed(sampling.seed).child("curvature", "probes"),
            task=f"{plan.provenance['run']}/{subject.path.stem}, {loss} loss",
            progress=progress or Silent(),
        )

    losses = {CLEAN: measured(CLEAN, crafted.x), ADVERSARIAL: measured(ADVERSARIAL, crafted(subject.model))}
    record = replace(plan, losses=losses, provenance=_certificate(subject, plan, losses))
    return record, _stored(record, subject, sampling)


def planned_curvature(
    checkpoint: Path,
    sampling: Sampling,
    settings: Settings,
    *,
    beta: float | None = None,
    data_folder: Path | None = None,
) -> CurvatureRecord:
    """The record `measure_curvature` will make, still without losses: what is comparable can be known before."""
    return _plan(
        _subject(checkpoint, sampling, data_folder, torch.device("cpu")), sampling, settings, beta, data_folder
    )


def _plan(
    subject: _Subject, sampling: Sampling, settings: Settings, beta: float | None, folder: Path | None
) -> CurvatureRecord:
    part = sampling.on.replace("_", "-")
    return CurvatureRecord(
        losses={},
        threat={"norm": subject.threat.norm, "eps": subject.threat.eps},
        attack={"name": subject.label, **describe(subject.crafted.attack, subject.threat)},
        settings={
            **asdict(settings),
            "beta": len(data_part(subject.recipe, "train", folder)) if beta is None else beta,
        },
        marks=subject.model.marks,
        provenance={
            "run": subject.path.parent.resolve().name,
            **subject.facts,
            "train_seed": subject.recipe.seed,
            "data": f"{subject.data.name} {part}, {len(subject.data)} of {subject.whole} samples",
            "precision": sampling.precision,
            "seed": sampling.seed,
        },
    )


def _subject(checkpoint: Path, sampling: Sampling, folder: Path | None, device: torch.device) -> _Subject:
    path, tensors, meta = open_checkpoint(checkpoint)
    model, recipe = restored(path, tensors, meta)
    label, attack = parse_attack(recipe.select.attack if sampling.attack is None else sampling.attack)
    whole = data_part(recipe, sampling.on, folder)
    check_fit(model, whole)
    check_classes(whole, meta)
    if sampling.images < whole.num_classes:
        raise ConfigError(
            f"{sampling.images} images leave out some of the {whole.num_classes} classes of {whole.name!r}; "
            f"measure curvature on at least {whole.num_classes}"
        )
    data, threat, dtype = fair_subset(whole, sampling.images), build_threat(recipe), PRECISIONS[sampling.precision]
    x = data.images(torch.arange(len(data))).to(device=device, dtype=dtype)
    seed = Seed(sampling.seed).child("curvature", "attack")
    size = sampling.batch_size or BATCH
    crafted = Crafted(attack, x, data.y.to(device), data.ids.to(device), threat, seed, size)
    model = model.to(device=device, dtype=dtype)
    return _Subject(path, model, recipe, facts(path, recipe, meta), data, len(whole), threat, label, crafted)


def _certificate(subject: _Subject, plan: CurvatureRecord, losses: Mapping[str, Curvature]) -> dict[str, Any]:
    return birth_certificate(
        device=subject.crafted.x.device,
        **plan.provenance,
        batch_size=subject.crafted.size,
        seconds=round(sum(found.seconds for found in losses.values()), 2),
    )


def _stored(record: CurvatureRecord, subject: _Subject, sampling: Sampling) -> Path:
    """Beside the checkpoint, under a name that says what it is of; its end stands for everything else that was set."""
    attack = re.sub(r"[^\w.=-]+", "_", subject.label)[:60]
    told = f"{subject.path.stem}-{attack}-{sampling.on}{len(subject.data)}-seed{sampling.seed}"
    rest = sha256(json_text([record.settings, record.attack, sampling.precision]))[:8]
    target = subject.path.with_name(f"curvature-{told}-{rest}.json")
    write_atomic(target, record.to_json().encode())
    return target
