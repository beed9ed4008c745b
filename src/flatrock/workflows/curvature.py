"""Trained network -> curvature: measure that of a checkpoint, or of a model that is no run, resumably, and store it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatrock.attacks.catalog import describe, parse_attack
from flatrock.attacks.craft import craft
from flatrock.core.errors import ConfigError, DataError
from flatrock.core.files import json_text, sha256, write_atomic
from flatrock.core.identity import ANSWERS, MODEL_CODE, differences
from flatrock.core.options import choose, count
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import VERSION, birth_certificate
from flatrock.core.rng import Seed
from flatrock.core.tensorfile import digest
from flatrock.core.threat import Threat
from flatrock.core.types import Attack
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset
from flatrock.diagnostics.curvature import Curvature, Settings, curvature
from flatrock.diagnostics.curvature_record import ADVERSARIAL, CLEAN, CurvatureRecord
from flatrock.diagnostics.kept import Kept
from flatrock.diagnostics.ledger import Ledger, forget, measuring
from flatrock.diagnostics.probe import fitting
from flatrock.workflows.foreign_model import ForeignModel
from flatrock.workflows.trained import Trained, check_replaced, open_trained, said, stored, tell_replaced

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
    """What is measured: a network as it was opened, its samples on the device, and how they are attacked."""

    trained: Trained
    data: Dataset
    whole: int
    threat: Threat
    label: str
    crafted: Crafted
    known_by: dict[str, Any]


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
    source: Path | ForeignModel,
    sampling: Sampling,
    settings: Settings,
    *,
    beta: float | None = None,
    folder: Path = Path(),
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    resume: bool = False,
    progress: Progress | None = None,
) -> tuple[CurvatureRecord, Path]:
    """The curvature of a checkpoint's clean and adversarial cross-entropy, and the file it is stored in.

    The record of a checkpoint goes beside it, that of a model that is no run into `folder`. `beta` of PAC-Bayes is the
    number of training samples, unless told otherwise. Every finished part is on disk; with `resume` a measurement goes
    on from there, and a finished one is read.
    """
    listener = progress or Silent()
    trained = _opened(source, sampling, folder, data_folder, listener)
    subject = _subject(trained, sampling, torch.device(device))
    plan = _plan(subject, sampling, settings, beta)
    target = _target(plan, subject, sampling)
    part, identity = target.with_suffix(".part"), _identity(plan, sampling, device)
    known = stored(target, _read, must=resume)
    odd = _different(known, plan)
    if resume and (known := _finished(trained, target, known, odd, identity)):
        forget(part)
        listener.say(f"read {target}, which was measured before")
        return known, target
    if resume:
        _check_begun(part, subject, identity)
    crafted, model = subject.crafted, trained.model.to(device=device, dtype=subject.crafted.x.dtype)

    def measured(loss: str, x: Tensor, ledger: Ledger) -> Curvature:
        return curvature(
            model,
            x,
            crafted.y,
            beta=plan.settings["beta"],
            settings=settings,
            attack=crafted if loss == ADVERSARIAL else None,
            batch_size=crafted.size,
            seed=Seed(sampling.seed).child("curvature", "probes"),
            task=f"{trained.title}, {loss} loss",
            progress=listener,
            # An attack that does not repeat itself bit by bit (on a GPU) makes other inputs: nothing is known of them.
            kept=Kept(ledger, f"{loss} {_fingerprint(x)[:16]} "),
        )

    with measuring(part, identity, resume=resume) as ledger:
        losses = {CLEAN: measured(CLEAN, crafted.x, ledger), ADVERSARIAL: measured(ADVERSARIAL, crafted(model), ledger)}
        record = replace(plan, losses=losses, provenance=_certificate(subject, plan, losses))
        write_atomic(target, record.to_json().encode())
        ledger.close()
    listener.say(f"wrote {target}")
    tell_replaced(odd, listener)
    return record, target


def planned_curvature(
    source: Path | ForeignModel,
    sampling: Sampling,
    settings: Settings,
    *,
    beta: float | None = None,
    folder: Path = Path(),
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    resume: bool = False,
) -> CurvatureRecord:
    """The record `measure_curvature` will make, still without losses: what is comparable can be known before.

    So can what will not be resumed because it was begun otherwise (StateError).
    """
    trained = _opened(source, sampling, folder, data_folder, Silent())
    subject = _subject(trained, sampling, torch.device("cpu"))
    plan = _plan(subject, sampling, settings, beta)
    target = _target(plan, subject, sampling)
    known, identity = stored(target, _read, must=resume), _identity(plan, sampling, device)
    if resume and _finished(trained, target, known, _different(known, plan), identity) is None:
        _check_begun(target.with_suffix(".part"), subject, identity)
    return plan


def _plan(subject: _Subject, sampling: Sampling, settings: Settings, beta: float | None) -> CurvatureRecord:
    trained = subject.trained
    return CurvatureRecord(
        losses={},
        threat={"norm": subject.threat.norm, "eps": subject.threat.eps},
        attack={"name": subject.label, **describe(subject.crafted.attack, subject.threat)},
        settings={**asdict(settings), "beta": _training_samples(trained) if beta is None else beta},
        marks=trained.marks,
        provenance={
            **trained.about,
            "data": said(sampling.on, subject.data, subject.whole),
            "precision": sampling.precision,
            "seed": sampling.seed,
            **subject.known_by,
        },
    )


def _training_samples(trained: Trained) -> int:
    try:
        return len(trained.part("train"))
    except DataError as error:
        raise DataError(f"beta: {error}; or say --beta N, the number of its training samples") from error


def _fingerprint(*tensors: Tensor) -> str:
    return digest({str(i): t.cpu().contiguous() for i, t in enumerate(tensors)}, "")


def _asked(plan: CurvatureRecord) -> dict[str, Any]:
    """What two measurements of the same have in common: settings, threat, attack, seed, precision, model, samples."""
    about = plan.provenance
    told = {name: about.get(name) for name in ("weights_digest", "data_digest")}
    told |= {name: about[name] for name in (ANSWERS, MODEL_CODE) if name in about}
    return {**plan.compared, **told}


def _identity(plan: CurvatureRecord, sampling: Sampling, device: torch.device | str) -> dict[str, Any]:
    """What must be the same for a measurement to go on: what is asked, and what changes the rounding."""
    how = {"flatrock": VERSION, "batch_size": sampling.batch_size or BATCH, "device": torch.device(device).type}
    return {**_asked(plan), **how}


def _read(file: Path) -> CurvatureRecord:
    return CurvatureRecord.from_json(file.read_bytes(), str(file))


def _different(known: CurvatureRecord | None, plan: CurvatureRecord) -> list[str]:
    """In what a record is of something else; digests that one of an older version does not tell are no difference."""
    if known is None:
        return []
    mine = _asked(plan)
    old = {name: mine.get(name) if value is None else value for name, value in _asked(known).items()}
    return differences(json_text(old), mine)


def _finished(
    trained: Trained, target: Path, known: CurvatureRecord | None, odd: Sequence[str], identity: Mapping[str, Any]
) -> CurvatureRecord | None:
    """The record that answers this question, wherever it was measured; None if there is none."""
    if known is None:
        return None
    check_replaced(trained, target, odd, identity=identity, data="data_digest")
    told = all(known.provenance.get(name) for name in ("weights_digest", "data_digest"))
    return known if told and known.provenance.get("flatrock") == VERSION and not odd else None


def _check_begun(part: Path, subject: _Subject, identity: Mapping[str, Any]) -> None:
    """StateError with what is different if this was begun with other weights or data, or only others were begun."""
    for file in [part] if part.exists() else sorted(part.parent.glob(f"curvature-{subject.trained.stem}-*.part")):
        with measuring(file, identity, resume=True):  # refuses one of another identity
            pass


def _opened(
    source: Path | ForeignModel, sampling: Sampling, folder: Path, data_folder: Path | None, progress: Progress
) -> Trained:
    return open_trained(
        source,
        what="measurement",
        on=sampling.on,
        attack=sampling.attack,
        folder=folder,
        data_folder=data_folder,
        progress=progress,
    )


def _subject(trained: Trained, sampling: Sampling, device: torch.device) -> _Subject:
    label, attack = parse_attack(trained.attack if sampling.attack is None else sampling.attack)
    whole = trained.part(sampling.on)
    known_by = trained.examine(whole, device)
    if sampling.images < whole.num_classes:
        raise ConfigError(
            f"{sampling.images} images leave out some of the {whole.num_classes} classes of {whole.name!r}; "
            f"measure curvature on at least {whole.num_classes}"
        )
    data, threat, dtype = fair_subset(whole, sampling.images), trained.threatened, PRECISIONS[sampling.precision]
    x = data.images(torch.arange(len(data)))
    known_by |= {"weights_digest": trained.digest, "data_digest": _fingerprint(x, data.y, data.ids)}
    x = x.to(device=device, dtype=dtype)
    seed = Seed(sampling.seed).child("curvature", "attack")
    size = sampling.batch_size or BATCH
    crafted = Crafted(attack, x, data.y.to(device), data.ids.to(device), threat, seed, size)
    return _Subject(trained, data, len(whole), threat, label, crafted, known_by)


def _certificate(subject: _Subject, plan: CurvatureRecord, losses: Mapping[str, Curvature]) -> dict[str, Any]:
    return birth_certificate(
        device=subject.crafted.x.device,
        **plan.provenance,
        batch_size=subject.crafted.size,
        seconds=round(sum(found.seconds for found in losses.values()), 2),
    )


def _target(plan: CurvatureRecord, subject: _Subject, sampling: Sampling) -> Path:
    """A name that says what it is of; its end stands for everything else that was set."""
    attack = re.sub(r"[^\w.=-]+", "_", subject.label)[:60]
    told = f"{subject.trained.stem}-{attack}-{sampling.on}{len(subject.data)}-seed{sampling.seed}"
    rest = sha256(json_text([plan.settings, plan.attack, sampling.precision]))[:8]
    return subject.trained.folder / f"curvature-{told}-{rest}.json"
