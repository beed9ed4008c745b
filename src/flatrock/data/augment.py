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
# How a turned image is read between pixels; torchvision's RandomRotation takes the nearest unless told otherwise.
Turn = Literal["bilinear", "nearest"]
TURNS = ("bilinear", "nearest")
# Least and largest share of an image that is erased.
ERASED = (0.02, 0.33)


def random_crop(x: Tensor, gen: SampleGen, *, padding: int, fill: Fill = "zero") -> Tensor:
    """Pad by `padding` and cut the old size out at one of the (2 padding + 1)^2 positions, all equally likely."""
    if fill not in FILLS:
        raise ConfigError(unknown("crop fill", fill, FILLS))
    height, width = x.shape[-2:]
    if fill == "reflect" and padding >= min(height, width):
        raise ConfigError(f"reflect padding must be smaller than the {height}x{width} images, got {padding}")
    padded = F.pad(x, [padding] * 4, mode=FILLS[fill])
    top, left = _integers(x, gen, [2 * padding + 1] * 2)
    row = top[:, None] + torch.arange(height, device=x.device)
    column = left[:, None] + torch.arange(width, device=x.device)
    return _picked(padded, row, column)


def _picked(x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Of each image these rows [n, H] and columns [n, W]."""
    sample = torch.arange(x.shape[0], device=x.device)
    channel = torch.arange(x.shape[1], device=x.device)
    return x[sample[:, None, None, None], channel[:, None, None], row[:, None, :, None], column[:, None, None, :]]


def crop_shift(x: Tensor, gen: SampleGen, *, lines: int) -> Tensor:
    """Cut 0 to `lines` rows and columns off the edges, and put what is left anywhere in a black image of the old size.

    How many lines, how many of them rows, how many from which edge, and where the rest goes is drawn one after the
    other, each time uniformly from what is possible (Li & Spratling 2023).
    """
    height, width = x.shape[-2:]
    if lines >= min(height, width):
        raise ConfigError(f"shift must leave something of the {height}x{width} images, got {lines} lines")
    u = _uniform(x, gen, 6)
    off = _below(u[:, 0], lines + 1)
    rows_off = _below(u[:, 1], off + 1)
    row, row_there = _shifted(height, rows_off, u[:, 2:4])
    column, column_there = _shifted(width, off - rows_off, u[:, 4:6])
    return _picked(x, row, column) * (row_there[:, None, :, None] & column_there[:, None, None, :])


def _shifted(size: int, off: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """For each line of the new image the line of the old one that is put there, and whether there is one."""
    start, to = _below(u[:, 0], off + 1)[:, None], _below(u[:, 1], off + 1)[:, None]
    place = torch.arange(size, device=u.device) - to
    return (place + start).clamp(0, size - 1), (place >= 0) & (place < size - off[:, None])


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


def random_erasing(x: Tensor, gen: SampleGen, *, share: float) -> Tensor:
    """With probability `share` fill a rectangle with noise of U[0, 1) (Zhong et al. 2020).

    It has 2 to 33 % of the area (as far as it fits), sides in a ratio of 0.3 to 3.3 (its logarithm is uniform), and
    lies fully inside, everywhere with the same probability.
    """
    height, width = x.shape[-2:]
    u = _uniform(x, gen.child("where"), 5)
    area = height * width * (ERASED[0] + (ERASED[1] - ERASED[0]) * u[:, 1])
    ratio = torch.exp((2 * u[:, 2] - 1) * math.log(1 / 0.3))
    sides = (area * ratio).sqrt().round().clamp(1, height), (area / ratio).sqrt().round().clamp(1, width)
    inside = []
    for size, side, place in zip((height, width), sides, (u[:, 3], u[:, 4]), strict=True):
        line = torch.arange(size, device=x.device) - _below(place, size - side + 1)[:, None]
        inside.append((line >= 0) & (line < side[:, None]))
    hit = inside[0][:, None, :, None] & inside[1][:, None, None, :] & rows(u[:, 0] < share, x)
    return torch.where(hit, gen.child("noise").uniform(x), x)


def random_rotation(x: Tensor, gen: SampleGen, *, degrees: float, mode: Turn = "bilinear") -> Tensor:
    """Turn about the centre by an angle of U(-degrees, degrees); read between pixels as `mode` says, zero outside."""
    if mode not in TURNS:
        raise ConfigError(unknown("rotation mode", mode, TURNS))
    height, width = x.shape[-2:]
    angle = (2 * _uniform(x, gen, 1) - 1) * math.radians(degrees)
    cos, sin = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    # Pixel centres relative to the image centre, in pixels, so that oblong images turn without shear.
    v = torch.arange(height, device=x.device, dtype=torch.float64)[None, :, None] - (height - 1) / 2
    u = torch.arange(width, device=x.device, dtype=torch.float64)[None, None, :] - (width - 1) / 2
    grid = torch.stack([(cos * u - sin * v) * 2 / width, (sin * u + cos * v) * 2 / height], dim=-1).to(x.dtype)
    turned = F.grid_sample(x, grid, mode=mode, padding_mode="zeros", align_corners=False)
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
    partner = seed.child("partner").permutation(len(x)).to(x.device, non_blocking=True)
    return torch.lerp(x[partner], x, share), torch.lerp(y_onehot[partner], y_onehot, share)


def cutmix(x: Tensor, y_onehot: Tensor, seed: Seed, *, alpha: float) -> tuple[Tensor, Tensor]:
    """A rectangle of every image replaced by that of another, targets mixed by area (Yun et al. 2019).

    One lambda ~ Beta(alpha, alpha), one rectangle and one shuffle p for the batch: sides sqrt(1 - lambda) of the
    image's, its middle uniform in the image, cut off at the edges. The share of x[p] in the targets is that of the
    pixels replaced, not 1 - lambda.
    """
    if not alpha > 0:
        raise ConfigError(f"cutmix alpha must be above 0, got {alpha!r}")
    if x.dim() != 4:
        raise ConfigError(f"cutmix needs images [n, C, H, W], got shape {tuple(x.shape)}; use mixup, or switch it off")
    draw = np.random.default_rng(seed.child("lambda").key)
    part = math.sqrt(1 - float(draw.beta(alpha, alpha)))
    spans = [_span(size, part, float(draw.random())) for size in x.shape[-2:]]
    partner = seed.child("partner").permutation(len(x)).to(x.device, non_blocking=True)
    mixed = x.clone()
    mixed[..., spans[0], spans[1]] = x[partner][..., spans[0], spans[1]]
    replaced = math.prod(span.stop - span.start for span in spans) / math.prod(x.shape[-2:])
    return mixed, torch.lerp(y_onehot, y_onehot[partner], replaced)


def _span(size: int, part: float, u: float) -> slice:
    """Rows or columns of a rectangle whose side is this part of `size`, around the pixel floor(u * size)."""
    side, middle = int(size * part), int(u * size)
    return slice(max(middle - side // 2, 0), min(middle - side // 2 + side, size))


# What mixes samples of a batch, and their labels; a recipe may choose one.
MIXING = {"mixup": mixup, "cutmix": cutmix}


@dataclass(frozen=True)
class Augmentation:
    """Which changes are made: crop, shift, flip, rotation, brightness, cutout, erase, in this order. Zero is none."""

    crop: int = 0
    crop_fill: Fill = "zero"
    flip: bool = False
    cutout: int = 0
    rotation: float = 0.0
    brightness: float = 0.0
    shift: int = 0
    erase: float = 0.0
    rotation_mode: Turn = "bilinear"

    def __post_init__(self) -> None:
        limits = {"rotation": 180.0, "brightness": 1.0, "erase": 1.0}
        limits |= dict.fromkeys(("crop", "shift", "cutout"), math.inf)
        faults = [
            f"{name} must lie in 0..{limit:g}, got {getattr(self, name)!r}"
            for name, limit in limits.items()
            if not 0 <= getattr(self, name) <= limit
        ]
        if self.crop_fill not in FILLS:
            faults.append(unknown("crop fill", self.crop_fill, FILLS))
        if self.rotation_mode not in TURNS:
            faults.append(unknown("rotation mode", self.rotation_mode, TURNS))
        if faults:
            raise ConfigError("augmentation:", tuple(faults))

    def __call__(self, x: Tensor, gen: SampleGen) -> Tensor:
        """The changed batch; `gen` carries the ids of its samples."""
        if self == Augmentation(crop_fill=self.crop_fill, rotation_mode=self.rotation_mode):
            return x
        if x.dim() != 4:
            raise ConfigError(f"augmentation needs images [n, C, H, W], got shape {tuple(x.shape)}; switch it off")
        if self.crop:
            x = random_crop(x, gen.child("crop"), padding=self.crop, fill=self.crop_fill)
        if self.shift:
            x = crop_shift(x, gen.child("shift"), lines=self.shift)
        if self.flip:
            x = random_flip(x, gen.child("flip"))
        if self.rotation:
            x = random_rotation(x, gen.child("rotation"), degrees=self.rotation, mode=self.rotation_mode)
        if self.brightness:
            x = random_brightness(x, gen.child("brightness"), strength=self.brightness)
        if self.cutout:
            x = cutout(x, gen.child("cutout"), length=self.cutout)
        if self.erase:
            x = random_erasing(x, gen.child("erase"), share=self.erase)
        return x


def _uniform(x: Tensor, gen: SampleGen, count: int) -> Tensor:
    """`count` numbers of U[0, 1) per sample, in double precision so that scaling them does not round up."""
    return gen.uniform(torch.empty(len(x), count, device=x.device, dtype=torch.float64))


def _integers(x: Tensor, gen: SampleGen, limits: list[int]) -> list[Tensor]:
    """For each limit k, one integer of 0..k-1 per sample."""
    u = _uniform(x, gen, len(limits))
    return [_below(u[:, i], limit) for i, limit in enumerate(limits)]


def _below(u: Tensor, limit: int | Tensor) -> Tensor:
    """An integer of 0..limit-1 for each number of U[0, 1)."""
    return (u * limit).long()
