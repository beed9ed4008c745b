"""Label images with a trained model, so that another can be trained on them too (robust self-training)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatrock.attacks.craft import check_logits
from flatrock.core.borrow import full_precision
from flatrock.core.device import pick_device
from flatrock.core.errors import ConfigError, DataError, StateError
from flatrock.core.files import json_text
from flatrock.core.progress import Progress, Silent
from flatrock.core.provenance import birth_certificate
from flatrock.core.runs import Run
from flatrock.data.dataset import Dataset
from flatrock.data.npz import load_unlabelled, save
from flatrock.models.classifier import Classifier
from flatrock.recipes.restore import load, open_checkpoint


@dataclass(frozen=True)
class PseudoLabels:
    """What was written: how many images each class got, and the mean of the largest softmax probability."""

    file: Path
    counts: dict[str, int]
    confidence: float
    provenance: dict[str, Any]

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        return f"{sum(self.counts.values())} images, mean confidence {self.confidence:.3f}: {shares}"


def pseudo_label(
    source: Path | str | Run,
    images: Path,
    out: Path,
    *,
    which: str = "auto",
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PseudoLabels:
    """Write the images of an .npz file with the class a trained run gives each: argmax_k softmax(z)_k.

    The file holds image, label, confidence (the largest probability) and provenance (JSON text), and can be named as
    `data.extra.file` of a recipe.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size!r}")
    if out.exists() and not overwrite:
        raise StateError(f"{out} exists and is left alone; choose another name or overwrite it with --overwrite")
    where = pick_device(device)
    checkpoint, _, meta = open_checkpoint(source, which)
    model = load(checkpoint, device=where)
    data = load_unlabelled(images, num_classes=model.num_classes)
    if data.input_shape != tuple(model.input_shape):
        raise DataError(
            f"{images} has images {data.input_shape} (channels, height, width), the model of {checkpoint} takes "
            f"{tuple(model.input_shape)}; resize them, or use a run trained on such images"
        )
    label, confidence = _answers(model, data, where, batch_size, progress or Silent())
    provenance = birth_certificate(
        device=where,
        seed=meta["recipe"]["seed"],
        run=checkpoint.absolute().parent.name,
        recipe=meta["recipe"]["name"],
        recipe_hash=meta["recipe_hash"],
        checkpoint=checkpoint.name,
        marks=list(model.marks),
        images=images.name,
        images_digest=data.fingerprint(),
    )
    save(out, replace(data, y=label), confidence=confidence.numpy(), provenance=np.array(json_text(provenance)))
    names = meta["class_names"] or [str(k) for k in range(model.num_classes)]
    counts = torch.bincount(label, minlength=model.num_classes).tolist()
    return PseudoLabels(out, dict(zip(names, counts, strict=True)), float(confidence.mean()), provenance)


def _answers(
    model: Classifier, data: Dataset, device: torch.device, batch_size: int, progress: Progress
) -> tuple[Tensor, Tensor]:
    """The class of every image and its probability, on the CPU."""
    labels, confidences = [], []
    progress.begin("labelling", len(data))
    with torch.no_grad(), full_precision(device):
        for rows in torch.split(torch.arange(len(data)), batch_size):
            x = data.images(rows).to(device)
            logits = model(x)
            confidence, label = logits.softmax(1).max(1)
            check_logits(logits, x, label)
            labels.append(label.cpu())
            confidences.append(confidence.cpu())
            progress.advance(len(rows))
    progress.end()
    return torch.cat(labels), torch.cat(confidences)
