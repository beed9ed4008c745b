"""Trained network -> certificate: smooth it, certify it on its test set, resumably, and store what is proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.attacks.gaussian import Gaussian
from flatrock.attacks.smooth import SmoothPGD
from flatrock.core.device import Devices, alike_devices
from flatrock.core.errors import StateError
from flatrock.core.files import json_text, write_atomic
from flatrock.core.identity import differences
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import VERSION, birth_certificate
from flatrock.core.tensorfile import digest
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset
from flatrock.diagnostics.certificate import Certificate
from flatrock.diagnostics.certify import certify
from flatrock.diagnostics.ledger import forget, is_ledger, measuring
from flatrock.diagnostics.smoothing import Smoothing
from flatrock.recipes.restore import Source
from flatrock.recipes.schema import Recipe
from flatrock.workflows.foreign_model import ForeignModel, out_faults
from flatrock.workflows.trained import Trained, check_replaced, open_trained, said, stored, tell_replaced

# Attacks that train on noise of a sigma.
NOISY: dict[str, type[Gaussian | SmoothPGD]] = {"gaussian": Gaussian, "smooth-pgd": SmoothPGD}
# What a certificate says of its run or model, and the command line repeats.
_TOLD = ("recipe", "model", "data", "trained_with")


def certify_run(
    source: Source | ForeignModel,
    smoothing: Smoothing,
    *,
    which: str = "auto",
    radii: Sequence[float] = (),
    linf_eps: Sequence[float] = (),
    limit: int | None = None,
    batch_size: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    data_folder: Path | None = None,
    device: Devices = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Certificate, Path]:
    """Certify a run, or a model that is none, on its test set (a fair subset of it with `limit`); also the file.

    That is `out`, or one beside the checkpoint, or in the current folder for a model that is no run. L2 `radii` and
    `linf_eps` that are wanted are refused before any work if these numbers of votes cannot reach them. Every finished
    sample is on disk; `resume` goes on from there, and reads a certificate that is finished. Several devices, of one
    kind, share the samples.
    """
    listener, devices = progress or Silent(), alike_devices(device)
    trained = _opened(source, which, out, data_folder, progress)
    whole = trained.part("test")
    _check_wanted(smoothing, radii, linf_eps, prod(whole.input_shape))
    known_by = trained.examine(whole, devices[0])
    test = fair_subset(whole, limit)
    target = out or trained.folder / f"{_stem(trained.stem, smoothing, len(test), seed)}.json"
    identity = {**_identity(trained.digest, test, smoothing, seed, devices[0]), **known_by}
    born = birth_certificate(device=devices[0], seed=seed, **trained.about)
    about = {**born, "data": said("test", test, len(whole)), **_training_noise(trained.recipe), "asked": identity}
    part = target.with_suffix(".part")
    known = stored(target, lambda file: Certificate.from_json(file.read_bytes(), str(file)), must=resume)
    odd = None if known is None else _different(known, identity)
    if resume and known and odd is not None and _finished(known, trained, target, about, odd, smoothing, test):
        forget(part)
        listener.say(f"read {target}, which was certified before")
        return known, target
    with measuring(part, identity, resume=resume) as ledger:
        found = certify(
            trained.model,
            _inputs(test),
            test.y,
            smoothing,
            ids=test.ids,
            device=devices,
            batch_size=batch_size,
            seed=seed,
            ledger=ledger,
            progress=progress,
            marks=trained.marks,
            provenance=about,
        )
        _store(found, target, listener)
        ledger.close()
    tell_replaced(odd or (), progress)
    return found, target


def _opened(
    source: Source | ForeignModel, which: str, out: Path | None, folder: Path | None, progress: Progress | None
) -> Trained:
    return open_trained(
        source,
        what="certification",
        on="test",
        which=which,
        threat=False,
        faults=lambda: _out_faults(out),
        data_folder=folder,
        progress=progress,
    )


def _inputs(test: Dataset) -> Tensor:
    return test.images(torch.arange(len(test)))


def _store(found: Certificate, target: Path, listener: Progress) -> None:
    table = target.with_suffix(".tsv")
    write_atomic(table, found.to_tsv().encode())
    write_atomic(target, found.to_json().encode())
    listener.say(f"wrote {target}")
    listener.say(f"wrote {table}")


def _check_wanted(smoothing: Smoothing, radii: Sequence[float], linf_eps: Sequence[float], dimension: int) -> None:
    smoothing.check_votes()
    for radius in radii:
        smoothing.check_radius(radius)
    for eps in linf_eps:
        radius = eps * sqrt(dimension)
        smoothing.check_radius(
            radius, f"Linf {eps:g} = {255 * eps:.3g}/255 (radius {radius:.5f} in {dimension} dimensions)"
        )


def _out_faults(out: Path | None) -> list[str]:
    """A certificate and what lies beside it may be written over, and nothing else."""
    faults = out_faults(out, Certificate.from_json, what="certificate")
    if out is None or faults:
        return faults
    part = out.with_suffix(".part")
    if part.is_file() and not is_ledger(part):
        return [f"out: {part} exists and is no unfinished certificate; it is left alone, choose another name"]
    if out.exists() or part.exists():
        return []
    beside = [file for file in (out.with_suffix(".tsv"), out.with_suffix(".png")) if file.exists()]
    return [f"out: {file} exists, without a certificate; it is left alone, choose another name" for file in beside]


def _stem(name: str, smoothing: Smoothing, samples: int, seed: int) -> str:
    """Everything that makes another certificate is in its name."""
    s = smoothing
    return f"certificate-{name}-sigma{s.sigma:g}-n{s.n0}+{s.n}-alpha{s.alpha:g}-samples{samples}-seed{seed}"


def _identity(model: str, test: Dataset, smoothing: Smoothing, seed: int, device: torch.device) -> dict[str, Any]:
    """What must be the same for a certification to go on."""
    data = {"x": _inputs(test), "y": test.y, "ids": test.ids}
    return {
        "model": model,
        "data": digest({name: t.cpu().contiguous() for name, t in data.items()}, ""),
        **asdict(smoothing),
        "seed": seed,
        "flatrock": VERSION,
        "device": device.type,
    }


def _different(known: Certificate, identity: Mapping[str, Any]) -> list[str] | None:
    """In what a certificate is of something else, wherever it was computed; None if it does not tell what it is of."""
    asked = known.provenance.get("asked")
    if not isinstance(asked, dict):
        return None
    return differences(json_text({**asked, "device": None}), {**identity, "device": None})


def _finished(
    known: Certificate,
    trained: Trained,
    target: Path,
    about: Mapping[str, Any],
    other: Sequence[str],
    smoothing: Smoothing,
    test: Dataset,
) -> bool:
    """Whether this certificate answers the question; StateError if it is of something else, or damaged."""
    check_replaced(trained, target, other, identity=about["asked"])
    if other:
        return False
    odd = [name for name in _TOLD if known.provenance.get(name, "") != about.get(name, "")]
    expected = {"smoothing": smoothing, "shape": test.input_shape}
    odd += [name for name, value in expected.items() if getattr(known, name) != value]
    odd += [
        name for name, value in {"labels": test.y, "ids": test.ids}.items() if not getattr(known, name).equal(value)
    ]
    if odd:
        raise StateError(f"{target} is damaged (wrong: {', '.join(odd)}); certify again, without --resume")
    return True


def _training_noise(recipe: Recipe | None) -> dict[str, float | None]:
    """The sigma of the noise a run was trained on, None without; nothing of a model that is no run."""
    if recipe is None:
        return {}
    noisy = NOISY.get(recipe.attack.name)
    return {"trained_with": None if noisy is None else noisy(**recipe.attack.options).sigma}
