"""The 8x8 handwritten digits that come with scikit-learn: real data without a download."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flatrock.core.rng import Seed
from flatrock.data.dataset import Dataset, check
from flatrock.data.source import Source, SplitName, check_split

TEST_SIZE = 500


def load(split: SplitName, folder: Path) -> Dataset:
    """1797 images as float32 [N, 1, 8, 8], grey level / 16; a fixed random 500 of them are the test split."""
    check_split(split)
    grey, labels = _read()
    x = torch.from_numpy((grey / 16).astype(np.float32)).reshape(-1, 1, 8, 8)
    everything = Dataset("digits", x, torch.tensor(labels), 10, tuple("0123456789"))
    shuffled = Seed(0).child("digits", "test").permutation(len(everything))
    chosen = shuffled[:TEST_SIZE] if split == "test" else shuffled[TEST_SIZE:]
    return check(everything.subset(chosen.sort().values))


@cache
def _read() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Grey levels, 64 to a row, and labels, read once; nothing may be written into them.

    From scikit-learn's own file, as importing it takes far longer; if that is not where it was, scikit-learn is asked.
    """
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        if (file := Path(folder) / "datasets/data/digits.csv.gz").is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    grey, labels = load_digits(return_X_y=True)
    return grey, labels


SOURCE = Source(
    name="digits",
    num_classes=10,
    input_shape=(1, 8, 8),
    train_size=1297,
    needs="nothing to get, the images come with scikit-learn",
    find=lambda folder: "inside scikit-learn",
)
