"""Random changes of training images: pure functions on a batch [n, C, H, W] in [0, 1], on its device.

Each draws from a `SampleGen`, so what happens to a sample depends on its id and the seed, never on its batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flatrock.core.errors import ConfigError
from flatrock.core.registry import unknown
from flatrock.core.rng import SampleGen, Seed
from flatrock.core.threat import rows

Fill = Literal["zero", "reflect"]
# How torch's padding calls them.
FILLS = {"zero": "constant", "reflect": "reflect"}


def random_crop(x: Tensor, gen: SampleGen, *, padding: int, fill: Fill = "zero") -> Tensor:
    """Pad by `padding` and cut the old size out at one of the (2 padding + 1)^2 positions, all equally likely."""
    if fill not in FILLS:
        raise ConfigError(unknown("crop fill", fill, FILLS))
    n, channels, height, width = x.shape
    if fill == "reflect" and padding >= min(height, width):
        raise ConfigError(f"reflect padding must be smaller than the {height}x{width} images, got {padding}")
    padded = F.pad(x, [padding] * 4, mode=FILLS[fill])
    top, left = _integers(x, gen, [2 * padding + 1] * 2)
    row = top[:, None] + torch.arange(height, device=x.device)
    column = left[:, None] + torch.arange(width, device=x.device)
    sample = torch.arange(n, device=x.device)
    channel = torch.arange(channels, device=x.device)
    return padded[sample[:, None, None, None], channel[:, None, None], row[:, None, :, None], column[:, None, None, :]]


def random_flip(x: Tensor, gen: SampleGen) -> Tensor:
    """Mirror left and right with probability 1/2."""
    return torch.where(rows(_uniform(x, gen, 1)[:, 0] < 0.5, x), x.flip(-1), x)


def cutout(x: Tensor, gen: SampleGen, *, length: int) -> Tensor:
    """Set a square of side `length`, fully inside the image, to zero."""
    height, width = x.shape[-2:]
    if length > min(height, width):
        raise ConfigError(f"cutout length must fit the {height}x{width} images, got {length}")
    top, left = _integers(x, gen, [height - length + 1, width - length + 1])
    row = torch.arange(height, device=x.device) - top[:, None]
    column = torch.arange(width, device=x.device) - left[:, None]
    inside_rows, inside_columns = (row >= 0) & (row < length), (column >= 0) & (column < length)
    return x.masked_fill(inside_rows[:, None, :, None] & inside_columns[:, None, None, :], 0.0)


def random_rotation(x: Tensor, gen: SampleGen, *, degrees: float) -> Tensor:
    """Turn about the centre by an angle of U(-degrees, degrees); bilinear, zero outside."""
    height, width = x.shape[-2:]
    angle = (2 * _uniform(x, gen, 1) - 1) * math.radians(degrees)
    cos, sin = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    # Pixel centres relative to the image centre, in pixels, so that oblong images turn without shear.
    v = torch.arange(height, device=x.device, dtype=torch.float64)[None, :, None] - (height - 1) / 2
    u = torch.arange(width, device=x.device, dtype=torch.float64)[None, None, :] - (width - 1) / 2
    grid = torch.stack([(cos * u - sin * v) * 2 / width, (sin * u + cos * v) * 2 / height], dim=-1).to(x.dtype)
    turned = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    # The four weights may add up to a rounding error more than 1.
    return turned.clamp(0, 1)


def random_brightness(x: Tensor, gen: SampleGen, *, strength: float) -> Tensor:
    """Add one number of U(-strength, strength) to the whole image and clip to [0, 1]."""
    shift = ((2 * _uniform(x, gen, 1)[:, 0] - 1) * strength).to(x.dtype)
    return (x + rows(shift, x)).clamp(0, 1)


def mixup(x: Tensor, y_onehot: Tensor, seed: Seed, *, alpha: float) -> tuple[Tensor, Tensor]:
    """Inputs lambda x + (1 - lambda) x[p] and targets likewise; one lambda ~ Beta(alpha, alpha) and one shuffle p."""
    if not alpha > 0:
        raise ConfigError(f"mixup alpha must be above 0, got {alpha!r}")
    share = float(np.random.default_rng(seed.child("lambda").key).beta(alpha, alpha))
    partner = seed.child("partner").permutation(len(x)).to(x.device)
    return torch.lerp(x[partner], x, share), torch.lerp(y_onehot[partner], y_onehot, share)


@dataclass(frozen=True)
class Augmentation:
    """Which changes are made, in this order: crop, flip, rotation, brightness, cutout. Zero or False is none."""

    crop: int = 0
    crop_fill: Fill = "zero"
    flip: bool = False
    cutout: int = 0
    rotation: float = 0.0
    brightness: float = 0.0

    def __post_init__(self) -> None:
        limits = {"crop": math.inf, "cutout": math.inf, "rotation": 180.0, "brightness": 1.0}
        faults = [
            f"{name} must lie in 0..{limit:g}, got {getattr(self, name)!r}"
            for name, limit in limits.items()
            if not 0 <= getattr(self, name) <= limit
        ]
        if self.crop_fill not in FILLS:
            faults.append(unknown("crop fill", self.crop_fill, FILLS))
        if faults:
            raise ConfigError("augmentation:", tuple(faults))

    def __call__(self, x: Tensor, gen: SampleGen) -> Tensor:
        """The changed batch; `gen` carries the ids of its samples."""
        if self == Augmentation(crop_fill=self.crop_fill):
            return x
        if x.dim() != 4:
            raise ConfigError(f"augmentation needs images [n, C, H, W], got shape {tuple(x.shape)}; switch it off")
        if self.crop:
            x = random_crop(x, gen.child("crop"), padding=self.crop, fill=self.crop_fill)
        if self.flip:
            x = random_flip(x, gen.child("flip"))
        if self.rotation:
            x = random_rotation(x, gen.child("rotation"), degrees=self.rotation)
        if self.brightness:
            x = random_brightness(x, gen.child("brightness"), strength=self.brightness)
        if self.cutout:
            x = cutout(x, gen.child("cutout"), length=self.cutout)
        return x


def _uniform(x: Tensor, gen: SampleGen, count: int) -> Tensor:
    """`count` numbers of U[0, 1) per sample, in double precision so that scaling them does not round up."""
    return gen.uniform(torch.empty(len(x), count, device=x.device, dtype=torch.float64))


def _integers(x: Tensor, gen: SampleGen, limits: list[int]) -> list[Tensor]:
    """For each limit k, one integer of 0..k-1 per sample."""
    u = _uniform(x, gen, len(limits))
    return [(u[:, i] * limit).long() for i, limit in enumerate(limits)]
