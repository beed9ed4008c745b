"""Your own images: FOLDER/train/<class>/* and FOLDER/test/<class>/* (or val/<class>/*)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatrock.core.errors import DataError
from flatrock.core.progress import Progress
from flatrock.data.dataset import Dataset, check
from flatrock.data.pictures import ENDINGS, Form, Pictures, read_all
from flatrock.data.pictures import damaged as damaged_files
from flatrock.data.source import SPLITS, Source, SplitName, check_split

# Bytes; a split that takes more is read when it is needed. The same on every machine, because a run knows such data by
# other marks (Dataset.fingerprint).
HELD = 4 << 30


def load(
    split: SplitName, folder: Path, *, channels: int = 3, size: int | None = None, resize: int | None = None
) -> Dataset:
    """uint8 [N, channels, H, W], classes and files in alphabetical order; `size` and `resize` as in `Form`.

    Class numbers come from the folders of train/, so that a test split lacking a class keeps the numbering. A split
    that takes more than HELD bytes stays in its files, if `size` is given.
    """
    form = Form(channels=channels, size=size, resize=resize)
    here, names, files = _listed(split, folder)
    y = torch.tensor([label for _, label in files], dtype=torch.int64)
    return check(Dataset("folder", _read(here, [file for file, _ in files], form), y, len(names), tuple(names)))


def damaged(split: SplitName, folder: Path, progress: Progress, **options: Any) -> list[str]:
    """What is wrong with every image of a split that cannot be read; nothing of a split that is not there."""
    if not _place(folder, split).is_dir():
        return []
    here, _, files = _listed(split, folder)
    return damaged_files(here, [file for file, _ in files], Form(**options), progress)


def _listed(split: SplitName, folder: Path) -> tuple[Path, list[str], list[tuple[str, int]]]:
    """Where a split lies, its classes, and its files with their labels."""
    check_split(split)
    here = _place(folder, split)
    names = _classes(folder / "train" if (folder / "train").is_dir() else here)
    extra = [name for name in _classes(here) if name not in names]
    if extra:
        raise DataError(
            f"{here / extra[0]} is no class of {folder / 'train'} ({', '.join(names)}); rename or remove it"
        )
    return here, names, [(f"{name}/{file}", label) for label, name in enumerate(names) for file in _images(here / name)]


def _read(here: Path, files: Sequence[str], form: Form) -> Tensor | Pictures:
    if form.size is not None:
        stored = Pictures(here, files, form)
        if math.prod(stored.shape) > HELD:
            return stored
    return read_all([here / file for file in files], form)


def _place(folder: Path, split: SplitName) -> Path:
    """Where a split lies; images to test with may be called val/, as those of ImageNet are."""
    usual, other = folder / split, folder / "val"
    return other if split == "test" and other.is_dir() and not usual.is_dir() else usual


def _classes(place: Path) -> list[str]:
    if not place.is_dir():
        raise SOURCE.missing(f"folder {place.name}/", place.parent)
    names = sorted(p.name for p in place.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise DataError(f"{place} holds no class folders; put the images into {place}/<class>/")
    return names


def _images(place: Path) -> list[str]:
    """Paths below a class folder, however deep (links to folders are not followed)."""
    if not place.is_dir():
        return []
    paths = (path.relative_to(place) for path in place.rglob("*") if path.suffix.lower() in ENDINGS)
    names = sorted(path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))
    if not names:
        raise DataError(f"{place} holds no images (looked for {', '.join(ENDINGS)}); add some or remove the folder")
    return names


def _found(folder: Path) -> str | None:
    there = [place.name for split in SPLITS if (place := _place(folder, split)).is_dir()]
    return f"{folder} ({' and '.join(there)})" if there else None


SOURCE = Source(
    name="folder",
    num_classes=None,
    input_shape=None,
    train_size=None,
    needs="put images into FOLDER/train/<class>/ and FOLDER/test/<class>/ and pass --data-dir FOLDER; those of more "
    "than one size need data.size (without a recipe: --data folder:size=64)",
    find=_found,
)
