"""Two interleaved half circles in the plane: the smallest problem with a curved boundary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from flatrock.core.errors import ConfigError
from flatrock.core.rng import Seed
from flatrock.data.dataset import Dataset, check
from flatrock.data.source import SPLITS, Source, SplitName, check_split

SHIFT, SCALE = 1.5, 4.0


def load(split: SplitName, folder: Path, *, points: int = 1000, noise: float = 0.1) -> Dataset:
    """`points` points as float32 [N, 2], stored as (x + 1.5)/4 so that they lie in the unit square.

    A distance d of the usual moons is d/4 here: a radius of 0.02 there is eps = 0.005. Train and test are separate
    draws.
    """
    from sklearn.datasets import make_moons

    check_split(split)
    check_options(points=points, noise=noise)
    drawn = {}
    for name in SPLITS:  # both: noise that is too much for one only would be noticed after training
        draw = Seed(0).child("moons", name).key % 2**32
        plane, labels = make_moons(n_samples=points, noise=noise, random_state=draw)
        stored = (plane + SHIFT) / SCALE
        if stored.min() < 0 or stored.max() > 1:
            raise ConfigError(f"moons with noise={noise} leave the unit square; use less noise (0.1 is usual)")
        drawn[name] = stored, labels
    stored, labels = drawn[split]
    x = torch.from_numpy(stored.astype(np.float32))
    return check(Dataset("moons", x, torch.from_numpy(labels).long(), 2, ("upper", "lower")))


def check_options(*, points: int = 1000, noise: float = 0.1) -> None:
    """ConfigError unless so many points can be drawn, with so much noise as far as that is known before."""
    if not isinstance(points, int) or not isinstance(noise, int | float) or points < 2 or noise < 0:
        raise ConfigError(f"moons needs points >= 2 and noise >= 0, got points={points!r}, noise={noise!r}")


SOURCE = Source(
    name="moons",
    num_classes=2,
    input_shape=(2,),
    train_size=1000,
    needs="nothing to get, the points are computed",
    find=lambda folder: "computed",
)
