"""CIFAR-10 and CIFAR-100 from the official binary version, or from the official Python version (data/pickled.py).

A record is one label byte (CIFAR-100: a coarse, then the fine label byte) and 3072 bytes of image, channel first. Both
versions hold the same records in the same order.
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
from flatrock.data.pickled import Array, read_pickled
from flatrock.data.source import SPLITS, Source, SplitName, check_split, read

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
class Pickled:
    """The Python version of a dataset; `labels` are the keys of its label lists, in the order of the label bytes."""

    subfolder: str
    files: dict[SplitName, tuple[str, ...]]
    labels: tuple[str, ...]
    archive: str

    @property
    def all_files(self) -> tuple[str, ...]:
        """Files of both splits."""
        return (*self.files["train"], *self.files["test"])


@dataclass(frozen=True)
class Layout:
    """How one of the two datasets is laid out; `label_limits` counts the values of each label byte, fine label last."""

    name: str
    subfolder: str
    files: dict[SplitName, tuple[str, ...]]
    label_limits: tuple[int, ...]
    class_names: tuple[str, ...]
    archive: RemoteFile
    pickled: Pickled

    @property
    def num_classes(self) -> int:
        """Number of fine labels."""
        return self.label_limits[-1]

    @property
    def all_files(self) -> tuple[str, ...]:
        """Files of both splits."""
        return (*self.files["train"], *self.files["test"])


def load(split: SplitName, folder: Path, *, layout: Layout) -> Dataset:
    """uint8 [N, 3, 32, 32] from the unpacked files or an archive in `folder`; an archive is unpacked beside itself."""
    check_split(split)
    found = _find(folder, layout, (split,))
    if found is None:
        raise _absent(folder, layout, split)
    place, version = found
    if place.is_file():
        extract(place, [f"{version.subfolder}/{name}" for name in version.all_files], place.parent)
        place = place.parent / version.subfolder
    parts = [_read(place / name, layout, version, RECORDS[layout.name, split]) for name in version.files[split]]
    x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return check(Dataset(layout.name, x, y, layout.num_classes, layout.class_names))


def _find(folder: Path, layout: Layout, splits: tuple[SplitName, ...]) -> tuple[Path, Layout | Pickled] | None:
    """Where the files of these splits or their archive are, and of which version; the binary one goes first."""
    versions: tuple[tuple[Layout | Pickled, str], ...]
    versions = (layout, layout.archive.filename), (layout.pickled, layout.pickled.archive)
    for version, archive in versions:
        for place in (folder / version.subfolder, folder):
            if all((place / name).is_file() for split in splits for name in version.files[split]):
                return place, version
        if (folder / archive).is_file():
            return folder / archive, version
    return None


def _absent(folder: Path, layout: Layout, split: SplitName) -> DataError:
    """Name the first missing file where others are there."""
    source = SOURCES[layout.name]
    for version in (layout, layout.pickled):
        names = version.files[split]
        for place in (folder / version.subfolder, folder):
            lost = [name for name in names if not (place / name).is_file()]
            if len(lost) < len(names):
                return source.missing(f"{lost[0]} (the other {len(names) - len(lost)} files are there)", place)
    return source.missing(f"{layout.subfolder}/ or {layout.archive.filename}", folder)


def _read(path: Path, layout: Layout, version: Layout | Pickled, expected: int) -> tuple[Tensor, Tensor]:
    """Images and fine labels of one file, after checking its size and every label."""
    archive = version.archive if isinstance(version, Pickled) else layout.archive.filename
    cure = f"delete it and get a fresh copy of {archive} from {_SITE}{archive}"
    if isinstance(version, Pickled):
        labels, pixels = _of_pickle(path, version, cure)
    else:
        labels, pixels = _of_records(path, layout, cure)
    if len(pixels) != expected:
        raise DataError(f"{path} holds {len(pixels)} records, expected {expected}; {cure}")
    wrong = ((labels < 0) | (labels >= np.array(layout.label_limits))).nonzero()
    if wrong[0].size:
        row, column = int(wrong[0][0]), int(wrong[1][0])
        limit = layout.label_limits[column]
        raise DataError(f"{path}: record {row} has label {labels[row, column]}, expected 0..{limit - 1}; {cure}")
    x = torch.from_numpy(pixels.copy()).reshape(-1, *SHAPE)
    return x, torch.from_numpy(labels[:, -1].astype(np.int64))


def _of_records(path: Path, layout: Layout, cure: str) -> tuple[Array, Array]:
    """Labels [N, label bytes] and pixels [N, 3072] of a file of the binary version."""
    label_bytes = len(layout.label_limits)
    length = label_bytes + PIXELS
    raw = np.frombuffer(read(path), dtype=np.uint8)
    if raw.size % length:
        raise DataError(
            f"{path} is truncated or not a {layout.name} file: its {raw.size} bytes are not a multiple of {length} "
            f"(one record); {cure}"
        )
    records = raw.reshape(-1, length)
    return records[:, :label_bytes], records[:, label_bytes:]


def _of_pickle(path: Path, version: Pickled, cure: str) -> tuple[Array, Array]:
    """The same of a file of the Python version."""
    content = read_pickled(path, cure=cure)
    if absent := [key for key in ("data", *version.labels) if key not in content]:
        raise DataError(f"{path} lacks {', '.join(absent)}; {cure}")
    pixels, lists = content["data"], [content[key] for key in version.labels]
    if not isinstance(pixels, np.ndarray) or pixels.shape[1:] != (PIXELS,):
        found = list(pixels.shape) if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise DataError(f"{path}: data must be bytes [N, {PIXELS}], got {found}; {cure}")
    for key, labels in zip(version.labels, lists, strict=True):
        if not isinstance(labels, list) or len(labels) != len(pixels) or not all(type(n) is int for n in labels):
            raise DataError(f"{path}: {key} must be a list of {len(pixels)} whole numbers; {cure}")
    # As Python's numbers, however large: one that fits no byte is named like any other label that is wrong.
    return np.array(lists, dtype=object).reshape(len(lists), -1).T, pixels


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
    pickled=Pickled(
        subfolder="cifar-10-batches-py",
        files={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
        labels=("labels",),
        archive="cifar-10-python.tar.gz",
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
    pickled=Pickled(
        subfolder="cifar-100-python",
        files={"train": ("train",), "test": ("test",)},
        labels=("coarse_labels", "fine_labels"),
        archive="cifar-100-python.tar.gz",
    ),
)


def _source(layout: Layout) -> Source:
    def find(folder: Path) -> str | None:
        found = _find(folder, layout, SPLITS)
        return None if found is None else str(found[0])

    return Source(
        name=layout.name,
        num_classes=layout.num_classes,
        input_shape=SHAPE,
        train_size=50_000,
        needs=f"{layout.archive.filename}, or its .bin files in {layout.subfolder}/ or the folder itself, or the "
        f"Python version ({layout.pickled.archive} or {layout.pickled.subfolder}/)",
        find=find,
        remote=(layout.archive,),
    )


SOURCES = {layout.name: _source(layout) for layout in (CIFAR10, CIFAR100)}
