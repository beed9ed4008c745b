"""CIFAR-10 and CIFAR-100 from the official binary version, which needs no unpickling.

A record is one label byte (CIFAR-100: a coarse, then the fine label byte) and 3072 bytes of image, channel first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flatrock.core.errors import DataError
from flatrock.data.archive import extract
from flatrock.data.dataset import Dataset, check
from flatrock.data.download import RemoteFile
from flatrock.data.source import Source, SplitName, check_split, read

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
# Records in each file of a split; every official copy has exactly these.
RECORDS = {("cifar10", "train"): 10_000, ("cifar10", "test"): 10_000}
RECORDS |= {("cifar100", "train"): 50_000, ("cifar100", "test"): 10_000}

_SITE = "https://www.cs.toronto.edu/~kriz/"
_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


@dataclass(frozen=True)
class Layout:
    """How one of the two datasets is laid out; `label_limits` counts the values of each label byte, fine label last."""

    name: str
    subfolder: str
    files: dict[SplitName, tuple[str, ...]]
    label_limits: tuple[int, ...]
    class_names: tuple[str, ...]
    archive: RemoteFile

    @property
    def num_classes(self) -> int:
        """Number of fine labels."""
        return self.label_limits[-1]

    @property
    def all_files(self) -> tuple[str, ...]:
        """Files of both splits."""
        return (*self.files["train"], *self.files["test"])


def load(split: SplitName, folder: Path, *, layout: Layout) -> Dataset:
    """uint8 [N, 3, 32, 32] from the unpacked files or the archive in `folder`; an archive is unpacked beside itself."""
    check_split(split)
    names = layout.files[split]
    place = _place(folder, layout, names)
    parts = [_read_records(place / name, layout, RECORDS[layout.name, split]) for name in names]
    x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return check(Dataset(layout.name, x, y, layout.num_classes, layout.class_names))


def _place(folder: Path, layout: Layout, names: tuple[str, ...]) -> Path:
    """The folder that holds all of `names`; unpacks the archive if that is what there is."""
    found = _find(folder, layout, names)
    if found is None:
        raise _absent(folder, layout, names)
    if found.is_file():
        extract(found, [f"{layout.subfolder}/{name}" for name in layout.all_files], found.parent)
        return found.parent / layout.subfolder
    return found


def _find(folder: Path, layout: Layout, names: tuple[str, ...]) -> Path | None:
    for place in (folder / layout.subfolder, folder):
        if all((place / name).is_file() for name in names):
            return place
    archive = folder / layout.archive.filename
    return archive if archive.is_file() else None


def _absent(folder: Path, layout: Layout, names: tuple[str, ...]) -> DataError:
    """Name the first missing file where others are there; tell owners of the pickled version why it does not do."""
    source = SOURCES[layout.name]
    for place in (folder / layout.subfolder, folder):
        lost = [name for name in names if not (place / name).is_file()]
        if len(lost) < len(names):
            return source.missing(f"{lost[0]} (the other {len(names) - len(lost)} files are there)", place)
    pickled = layout.archive.filename.replace("-binary", "-python")
    hint = ""
    if any((folder / name).exists() for name in (pickled, "cifar-10-batches-py", "cifar-100-python")):
        hint = " (the pickled Python version is there, but unpickling can run code, so it is not read)"
    return source.missing(f"{layout.subfolder}/ or {layout.archive.filename}{hint}", folder)


def _read_records(path: Path, layout: Layout, expected: int) -> tuple[Tensor, Tensor]:
    """Images and fine labels of one file, after checking its size and every label byte."""
    cure = f"delete it and get a fresh copy of {layout.archive.filename} from {layout.archive.urls[0]}"
    label_bytes = len(layout.label_limits)
    length = label_bytes + PIXELS
    raw = np.frombuffer(read(path), dtype=np.uint8)
    if raw.size % length:
        raise DataError(
            f"{path} is truncated or not a {layout.name} file: its {raw.size} bytes are not a multiple of {length} "
            f"(one record); {cure}"
        )
    records = raw.reshape(-1, length)
    if len(records) != expected:
        raise DataError(f"{path} holds {len(records)} records, expected {expected}; {cure}")
    wrong = (records[:, :label_bytes] >= np.array(layout.label_limits)).nonzero()
    if wrong[0].size:
        row, column = int(wrong[0][0]), int(wrong[1][0])
        limit = layout.label_limits[column]
        raise DataError(f"{path}: record {row} has label {records[row, column]}, expected 0..{limit - 1}; {cure}")
    x = torch.from_numpy(records[:, label_bytes:].copy()).reshape(-1, *SHAPE)
    return x, torch.from_numpy(records[:, label_bytes - 1].astype(np.int64))


CIFAR10 = Layout(
    name="cifar10",
    subfolder="cifar-10-batches-bin",
    files={"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
    label_limits=(10,),
    class_names=tuple(_CIFAR10_CLASSES.split()),
    archive=RemoteFile(
        urls=(_SITE + "cifar-10-binary.tar.gz",),
        filename="cifar-10-binary.tar.gz",
        size=170_052_171,
        checksum="sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
)

CIFAR100 = Layout(
    name="cifar100",
    subfolder="cifar-100-binary",
    files={"train": ("train.bin",), "test": ("test.bin",)},
    label_limits=(20, 100),
    class_names=tuple(_CIFAR100_CLASSES.split()),
    archive=RemoteFile(
        urls=(_SITE + "cifar-100-binary.tar.gz",),
        filename="cifar-100-binary.tar.gz",
        size=168_513_733,
        checksum="sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
)


def _source(layout: Layout) -> Source:
    def find(folder: Path) -> str | None:
        found = _find(folder, layout, layout.all_files)
        return None if found is None else str(found)

    return Source(
        name=layout.name,
        num_classes=layout.num_classes,
        input_shape=SHAPE,
        train_size=50_000,
        needs=f"{layout.archive.filename}, or its .bin files in {layout.subfolder}/ or the folder itself",
        find=find,
        remote=(layout.archive,),
    )


SOURCES = {layout.name: _source(layout) for layout in (CIFAR10, CIFAR100)}
