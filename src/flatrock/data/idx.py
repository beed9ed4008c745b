"""MNIST and Fashion-MNIST from idx-ubyte files, compressed or not.

An idx file is a big-endian magic number (0x0803 images, 0x0801 labels), one 32-bit length per dimension, then bytes.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatrock.core.errors import DataError
from flatrock.data.dataset import Dataset, check
from flatrock.data.download import RemoteFile
from flatrock.data.source import Source, SplitName, check_split, read

SHAPE = (1, 28, 28)
RECORDS = {"train": 60_000, "test": 10_000}
PREFIX: dict[SplitName, str] = {"train": "train", "test": "t10k"}
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Kind:
    """One of the two datasets. Their files have the same names and shapes; the label counts tell them apart."""

    name: str
    places: tuple[str, ...]
    class_names: tuple[str, ...]
    label_counts: dict[SplitName, tuple[int, ...]]
    remote: tuple[RemoteFile, ...]


def load(split: SplitName, folder: Path, *, kind: Kind) -> Dataset:
    """uint8 [N, 1, 28, 28]."""
    check_split(split)
    count, paths = RECORDS[split], []
    for content in (IMAGES, LABELS):
        name = f"{PREFIX[split]}-{content}"
        path = _find(folder, kind, name)
        if path is None:
            raise SOURCES[kind.name].missing(f"{name} (or {name}.gz)", folder)
        paths.append(path)
    images = _read_idx(paths[0], (count, *SHAPE[1:]))
    labels = _read_idx(paths[1], (count,))
    _check_labels(paths[1], labels, kind, split)
    x = torch.from_numpy(images.copy()).unsqueeze(1)
    return check(Dataset(kind.name, x, torch.from_numpy(labels.astype(np.int64)), 10, kind.class_names))


def _find(folder: Path, kind: Kind, name: str) -> Path | None:
    # Some packers write the first hyphen of the ending as a dot.
    spellings = [name, name.replace("-idx", ".idx")]
    for place in kind.places:
        for spelling in spellings:
            for path in (folder / place / spelling, folder / place / f"{spelling}.gz"):
                if path.is_file():
                    return path
    return None


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The bytes of an idx file whose header must say exactly `shape`."""
    header = struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)
    size = len(header) + int(np.prod(shape))
    raw = _unpacked(path, size)
    cure = "delete it and get a fresh copy"
    if raw[:4] != header[:4]:
        raise DataError(
            f"{path} is not an idx file of {len(shape)} dimensions: it begins with {raw[:4].hex()!r}; {cure}"
        )
    if raw[: len(header)] != header:
        said = list(struct.unpack_from(f">{min(len(shape), len(raw) // 4 - 1)}I", raw, 4))
        raise DataError(f"{path}: its header says shape {said}, expected {list(shape)}; {cure}")
    if len(raw) != size:
        problem = "is truncated" if len(raw) < size else "has bytes to spare"
        raise DataError(f"{path} {problem}: {len(raw)} bytes, expected {size}; {cure}")
    return np.frombuffer(raw, dtype=np.uint8, offset=len(header)).reshape(shape)


def _unpacked(path: Path, size: int) -> bytes:
    """The content, decompressed if it is gzip whatever the name says; at most one byte more than `size`."""
    raw = read(path)
    if raw[:2] != GZIP_MAGIC:
        return raw
    try:
        with gzip.open(path) as f:
            return f.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is truncated or corrupt gzip ({error}); delete it and get a fresh copy") from error


def _check_labels(path: Path, labels: np.ndarray[Any, Any], kind: Kind, split: SplitName) -> None:
    if labels.max() > 9:
        row = int((labels > 9).argmax())
        raise DataError(f"{path}: label {row} is {labels[row]}, expected 0..9; delete it and get a fresh copy")
    counts = tuple(np.bincount(labels, minlength=10).tolist())
    for other in KINDS:
        if other is not kind and counts == other.label_counts[split]:
            raise DataError(
                f"{path} holds the labels of {other.name}, not of {kind.name} (the files have the same names); "
                f"put {kind.name} into its own folder {kind.places[0]}/"
            )


def _files(sites: tuple[str, ...], facts: tuple[tuple[str, int, str], ...]) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(tuple(f"{site}{name}.gz" for site in sites), f"{name}.gz", size, f"md5:{md5}")
        for name, size, md5 in facts
    )


MNIST = Kind(
    name="mnist",
    places=("MNIST/raw", "mnist", ""),
    class_names=tuple("0123456789"),
    label_counts={
        "train": (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        "test": (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    },
    remote=_files(
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            (f"train-{IMAGES}", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            (f"train-{LABELS}", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
            (f"t10k-{IMAGES}", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
            (f"t10k-{LABELS}", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
    ),
)

FASHION_MNIST = Kind(
    name="fashion_mnist",
    places=("FashionMNIST/raw", "fashion-mnist", "fashion_mnist", ""),
    class_names=("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    label_counts={"train": (6000,) * 10, "test": (1000,) * 10},
    remote=_files(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        (
            (f"train-{IMAGES}", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            (f"train-{LABELS}", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
            (f"t10k-{IMAGES}", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
            (f"t10k-{LABELS}", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
    ),
)

KINDS = (MNIST, FASHION_MNIST)


def _source(kind: Kind) -> Source:
    def find(folder: Path) -> str | None:
        names = [f"{prefix}-{content}" for prefix in PREFIX.values() for content in (IMAGES, LABELS)]
        paths = [path for name in names if (path := _find(folder, kind, name)) is not None]
        return str(paths[0].parent) if len(paths) == len(names) else None

    return Source(
        name=kind.name,
        num_classes=10,
        input_shape=SHAPE,
        train_size=RECORDS["train"],
        needs=f"four idx-ubyte files, plain or .gz, in {kind.places[0]}/, {kind.places[1]}/ or the folder itself",
        find=find,
        remote=kind.remote,
        subfolder=kind.places[0],
    )


SOURCES = {kind.name: _source(kind) for kind in KINDS}
