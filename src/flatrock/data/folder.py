"""Your own images: FOLDER/train/<class>/* and FOLDER/test/<class>/*, all of one size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatrock.core.errors import ConfigError, DataError
from flatrock.data.dataset import Dataset, check
from flatrock.data.source import SPLITS, Source, SplitName, check_split

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
# Modes with 8 bits or less per channel; others would be clipped, not scaled, by a conversion.
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")


def load(split: SplitName, folder: Path, *, channels: int = 3) -> Dataset:
    """uint8 [N, channels, H, W], classes and files in alphabetical order; the whole split is held in memory.

    Class numbers come from the folders of train/, so that a test split lacking a class keeps the numbering.
    """
    check_split(split)
    if channels not in (1, 3):
        raise ConfigError(f"channels must be 1 (grey) or 3 (RGB), got {channels!r}")
    here = folder / split
    names = _classes(folder / "train" if (folder / "train").is_dir() else here)
    extra = [name for name in _classes(here) if name not in names]
    if extra:
        raise DataError(
            f"{here / extra[0]} is no class of {folder / 'train'} ({', '.join(names)}); rename or remove it"
        )
    files = [(path, label) for label, name in enumerate(names) for path in _images(here / name)]
    x = torch.from_numpy(_stack([path for path, _ in files], channels))
    y = torch.tensor([label for _, label in files], dtype=torch.int64)
    return check(Dataset("folder", x, y, len(names), tuple(names)))


def _classes(place: Path) -> list[str]:
    if not place.is_dir():
        raise SOURCE.missing(f"folder {place.name}/", place.parent)
    names = sorted(p.name for p in place.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise DataError(f"{place} holds no class folders; put the images into {place}/<class>/")
    return names


def _images(place: Path) -> list[Path]:
    if not place.is_dir():
        return []
    paths = sorted(p for p in place.iterdir() if p.suffix.lower() in ENDINGS and not p.name.startswith("."))
    if not paths:
        raise DataError(f"{place} holds no images (looked for {', '.join(ENDINGS)}); add some or remove the folder")
    return paths


def _stack(paths: list[Path], channels: int) -> np.ndarray[Any, Any]:
    first = _pixels(paths[0], channels)
    stack = np.empty((len(paths), *first.shape), dtype=np.uint8)
    for i, path in enumerate(paths):
        image = _pixels(path, channels)
        if image.shape != first.shape:
            height, width = image.shape[1:]
            raise DataError(
                f"{path} is {width}x{height}, but {paths[0]} is {first.shape[2]}x{first.shape[1]}; "
                "resize the images to one size first"
            )
        stack[i] = image
    return stack


def _pixels(path: Path, channels: int) -> np.ndarray[Any, Any]:
    """One image as uint8 [channels, H, W]."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode = image.mode
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB")) if mode in MODES else None
    except Exception as error:  # Pillow's decoders raise many kinds of exception on damaged files
        raise DataError(f"{path} cannot be decoded ({error}); replace or remove it") from error
    if pixels is None:
        raise DataError(f"{path} has more than 8 bits per channel (mode {mode}); save it with 8 bits")
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _found(folder: Path) -> str | None:
    there = [split for split in SPLITS if (folder / split).is_dir()]
    return f"{folder} ({' and '.join(there)})" if there else None


SOURCE = Source(
    name="folder",
    num_classes=None,
    input_shape=None,
    train_size=None,
    needs="put images of one size into FOLDER/train/<class>/ and FOLDER/test/<class>/ and pass --data-dir FOLDER",
    find=_found,
)
