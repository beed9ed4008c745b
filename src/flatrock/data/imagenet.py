"""ImageNet-1k in folders of its classes: train/<class>/*.JPEG and val/<class>/*.JPEG."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flatrock.core.progress import Progress
from flatrock.data import folder as images
from flatrock.data.dataset import Dataset
from flatrock.data.source import Source, SplitName

CLASSES, SIZE, RESIZE = 1000, 224, 256
# Where it is looked for, in this order.
PLACES = ("imagenet", "ILSVRC2012", "")


def load(split: SplitName, folder: Path) -> Dataset:
    """3x224x224 from the middle of images whose shorter side is made 256; classes in the order of their folders."""
    place = _place(folder)
    if place is None:
        raise SOURCE.missing(f"train/ with {CLASSES} class folders", folder)
    return replace(images.load(split, place, size=SIZE, resize=RESIZE), name="imagenet")


def damaged(split: SplitName, folder: Path, progress: Progress) -> list[str]:
    """What is wrong with every image of a split that cannot be read."""
    place = _place(folder)
    return [] if place is None else images.damaged(split, place, progress, size=SIZE, resize=RESIZE)


def _place(folder: Path) -> Path | None:
    """The first place whose parts have as many classes; anybody's photos may lie in a folder called train/."""
    for place in (folder / name for name in PLACES):
        parts = [place / part for part in ("train", "val", "test") if (place / part).is_dir()]
        if parts and all(sum(p.is_dir() for p in part.iterdir()) == CLASSES for part in parts):
            return place
    return None


def _found(folder: Path) -> str | None:
    place = _place(folder)
    return None if place is None else images.SOURCE.find(place)


SOURCE = Source(
    name="imagenet",
    num_classes=CLASSES,
    input_shape=(3, SIZE, SIZE),
    train_size=1_281_167,
    needs="train/<class>/*.JPEG and val/<class>/*.JPEG with the 1000 classes of ILSVRC 2012, which its makers give to "
    "those who register (its val images come in one folder: sort them by class first); pass --data-dir FOLDER, where "
    "FOLDER or FOLDER/imagenet holds them",
    find=_found,
)
