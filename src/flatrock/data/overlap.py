"""Samples that two data sets share, byte for byte."""

from __future__ import annotations

import numpy as np
import torch

from flatrock.data.dataset import Dataset

# Images that are looked at together.
PART = 8192


def shared_samples(few: Dataset, many: Dataset) -> int:
    """How many samples of `few` are in `many` too, images as bytes; 0 if their shapes differ.

    Sums of bytes with random weights, modulo 2^64, say which may be equal; their bytes then say which are.
    """
    if few.input_shape != many.input_shape:
        return 0
    wanted = _bytes(few, torch.arange(len(few)))
    weights = np.random.default_rng(0).integers(0, 2**64, wanted.shape[1], dtype=np.uint64)
    sums = wanted.astype(np.uint64) @ weights
    found: set[bytes] = set()
    for rows in torch.split(torch.arange(len(many)), PART):
        part = _bytes(many, rows)
        near = np.isin(part.astype(np.uint64) @ weights, sums)
        found |= {image.tobytes() for image in part[near]}
    return sum(image.tobytes() in found for image in wanted)


def _bytes(dataset: Dataset, rows: torch.Tensor) -> np.ndarray:
    """Samples as rows of bytes; floats of images are rounded to 8 bits, a few other numbers would then be alike."""
    x = dataset.pixels(rows).cpu()
    if x.dtype != torch.uint8:
        x = (255 * x).round().to(torch.uint8) if x.dim() == 4 else x.contiguous().view(torch.uint8)
    return x.flatten(1).numpy()
