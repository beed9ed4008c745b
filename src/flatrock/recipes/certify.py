"""Run -> certificate: smooth a checkpoint, certify it on its recipe's test set, resumably, and store what is proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.attacks.gaussian import Gaussian
from flatrock.core.errors import StateError
from flatrock.core.files import write_atomic
from flatrock.core.progress import Progress
from flatrock.core.provenance import VERSION, birth_certificate
from flatrock.core.tensorfile import digest, weights_digest
from flatrock.data.dataset import Dataset
from flatrock.data.split import fair_subset
from flatrock.diagnostics.certificate import Certificate
from flatrock.diagnostics.certify import certify
from flatrock.diagnostics.ledger import Ledger
from flatrock.diagnostics.smoothing import Smoothing
from flatrock.models.classifier import Classifier
from flatrock.recipes.build import check_fit
from flatrock.recipes.part import check_classes, data_part
from flatrock.recipes.restore import Source, facts, open_checkpoint, restored
from flatrock.recipes.schema import Recipe

# What a certificate says of its run, and the command line repeats.
_TOLD = ("recipe", "data", "trained_with")


def certify_run(
    source: Source,
    smoothing: Smoothing,
    *,
    which: str = "auto",
    radii: Sequence[float] = (),
    linf_eps: Sequence[float] = (),
    limit: int | None = None,
    batch_size: int | None = None,
    resume: bool = False,
    data_folder: Path | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Certificate, Path]:
    """Certify a trained model on its recipe's test set (a fair subset of it with `limit`); also the file it is in.

    L2 `radii` and `linf_eps` that are wanted are refused before any work if these numbers of votes cannot reach them.
    Every finished sample is on disk; `resume` goes on from there, and reads a certificate that is finished.
    """
    path, tensors, meta = open_checkpoint(source, which)
    model, recipe = restored(path, tensors, meta)
    _check_wanted(smoothing, radii, linf_eps, prod(model.input_shape))
    whole = data_part(recipe, "test", data_folder)
    check_fit(model, whole)
    check_classes(whole, meta)
    test = fair_subset(whole, limit)
    x = test.images(torch.arange(len(test)))
    target = path.with_name(f"{_stem(path, smoothing, len(test), seed)}.json")
    identity = _identity(model, {"x": x, "y": test.y, "ids": test.ids}, smoothing, seed, device)
    part = target.with_suffix(".part")
    about = {
        **birth_certificate(device=device, seed=seed, **facts(path, recipe, meta), train_seed=recipe.seed),
        "data": f"{test.name} test, {len(test)} of {len(whole)} samples",
        "trained_with": _training_noise(recipe),
        "asked": identity,
    }
    if resume and (known := _finished(target, about, smoothing, test)):
        part.unlink(missing_ok=True)  # of a repetition that was stopped
        return known, target
    ledger = Ledger(part, identity, resume=resume)
    found = certify(
        model.to(device),
        x,
        test.y,
        smoothing,
        ids=test.ids,
        batch_size=batch_size,
        seed=seed,
        ledger=ledger,
        progress=progress,
        marks=model.marks,
        provenance=about,
    )
    write_atomic(target.with_suffix(".tsv"), found.to_tsv().encode())
    write_atomic(target, found.to_json().encode())
    ledger.close()
    return found, target


def _check_wanted(smoothing: Smoothing, radii: Sequence[float], linf_eps: Sequence[float], dimension: int) -> None:
    for radius in radii:
        smoothing.check_radius(radius)
    for eps in linf_eps:
        radius = eps * sqrt(dimension)
        smoothing.check_radius(
            radius, f"Linf {eps:g} = {255 * eps:.3g}/255 (radius {radius:.5f} in {dimension} dimensions)"
        )


def _stem(path: Path, smoothing: Smoothing, samples: int, seed: int) -> str:
    """Everything that makes another certificate is in its name."""
    s = smoothing
    return f"certificate-{path.stem}-sigma{s.sigma:g}-n{s.n0}+{s.n}-alpha{s.alpha:g}-samples{samples}-seed{seed}"


def _identity(
    model: Classifier, data: Mapping[str, Tensor], smoothing: Smoothing, seed: int, device: torch.device | str
) -> dict[str, Any]:
    """What must be the same for a certification to go on."""
    return {
        "model": weights_digest(model),
        "data": digest({name: t.cpu().contiguous() for name, t in data.items()}, ""),
        **asdict(smoothing),
        "seed": seed,
        "flatrock": VERSION,
        "device": torch.device(device).type,
    }


def _finished(target: Path, about: Mapping[str, Any], smoothing: Smoothing, test: Dataset) -> Certificate | None:
    """The certificate that answers this question, wherever it was computed; None if there is none."""
    if not target.is_file():
        return None
    known = Certificate.from_json(target.read_bytes(), str(target))
    asked = known.provenance.get("asked")
    if not isinstance(asked, dict) or {**asked, "device": None} != {**about["asked"], "device": None}:
        return None
    odd = [name for name in _TOLD if name not in known.provenance or known.provenance[name] != about[name]]
    expected = {"smoothing": smoothing, "shape": test.input_shape}
    odd += [name for name, value in expected.items() if getattr(known, name) != value]
    odd += [
        name for name, value in {"labels": test.y, "ids": test.ids}.items() if not getattr(known, name).equal(value)
    ]
    if odd:
        raise StateError(f"{target} is damaged (wrong: {', '.join(odd)}); certify again, without --resume")
    return known


def _training_noise(recipe: Recipe) -> float | None:
    """The sigma of the noise a run was trained on; None without."""
    if recipe.attack.name != "gaussian":
        return None
    return Gaussian(**recipe.attack.options).sigma
