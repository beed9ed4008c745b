"""The 8x8 handwritten digits that come with scikit-learn: real data without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from flatrock.core.rng import Seed
from flatrock.data.dataset import Dataset, check
from flatrock.data.source import Source, SplitName, check_split

TEST_SIZE = 500


def load(split: SplitName, folder: Path) -> Dataset:
    """1797 images as float32 [N, 1, 8, 8], grey level / 16; a fixed random 500 of them are the test split."""
    from sklearn.datasets import load_digits

    check_split(split)
    raw = load_digits()
    x = torch.from_numpy((raw.images / 16).astype(np.float32)).unsqueeze(1)
    everything = Dataset("digits", x, torch.from_numpy(raw.target).long(), 10, tuple("0123456789"))
    shuffled = Seed(0).child("digits", "test").permutation(len(everything))
    chosen = shuffled[:TEST_SIZE] if split == "test" else shuffled[TEST_SIZE:]
    return check(everything.subset(chosen.sort().values))


SOURCE = Source(
    name="digits",
    num_classes=10,
    input_shape=(1, 8, 8),
    train_size=1297,
    needs="nothing to get, the images come with scikit-learn",
    find=lambda folder: "inside scikit-learn",
)
