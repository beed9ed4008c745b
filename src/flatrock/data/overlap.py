"""Samples that two data sets share, byte for byte."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch

from flatrock.data.dataset import Dataset

# Bytes that are looked at together.
TOGETHER = 2**26


def shared_samples(few: Dataset, many: Dataset) -> int:
    """How many samples of `few` are in `many` too; 0 if their shapes differ.

    Floats are rounded to 8 bits where the other data set has images of so many, and are else compared exactly.
    """
    if few.input_shape != many.input_shape:
        return 0
    rounded = torch.uint8 in (few.x.dtype, many.x.dtype)
    there = set(_digests(many, rounded=rounded))
    return sum(one in there for one in _digests(few, rounded=rounded))


def _digests(dataset: Dataset, *, rounded: bool) -> Iterator[bytes]:
    """One for every sample."""
    size = max(1, TOGETHER // (4 * math.prod(dataset.input_shape)))
    for rows in torch.split(torch.arange(len(dataset)), size):
        x = dataset.pixels(rows).cpu()
        if rounded and x.dtype != torch.uint8:
            x = (255 * x).round().to(torch.uint8)
        for sample in x.flatten(1).numpy():
            yield hashlib.blake2b(sample.tobytes(), digest_size=16).digest()
