from __future__ import annotations

import dataclasses
import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from flatrock.core.errors import DataError
from flatrock.data import idx
from flatrock.data.idx import FASHION_MNIST, MNIST, Kind

COUNTS = {"train": 60, "test": 40}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "RECORDS", COUNTS)


def _idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def _write(
    folder: Path, *, suffix: str = "", dotted: bool = False, labels: np.ndarray | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    folder.mkdir(parents=True, exist_ok=True)
    content = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        rng = np.random.default_rng(len(split))
        images = rng.integers(0, 256, (COUNTS[split], 28, 28))
        y = rng.integers(0, 10, COUNTS[split]) if labels is None else labels[: COUNTS[split]]
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", y)):
            raw = gzip.compress(_idx(array), 1) if suffix else _idx(array)
            (folder / ((name.replace("-idx", ".idx") if dotted else name) + suffix)).write_bytes(raw)
        content[split] = (images, y)
    return content


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("kind", "place"),
    [(MNIST, "MNIST/raw"), (MNIST, "mnist"), (MNIST, ""), (FASHION_MNIST, "FashionMNIST/raw"), (FASHION_MNIST, "")],
)
def test_usual_layouts_load(kind: Kind, place: str, suffix: str, tmp_path: Path) -> None:
    content = _write(tmp_path / place, suffix=suffix)
    for split, (images, labels) in content.items():
        data = idx.load(split, tmp_path, kind=kind)  # type: ignore[arg-type]
        assert np.array_equal(data.x.numpy(), images[:, None])
        assert data.y.tolist() == labels.tolist()
        assert (data.name, data.num_classes, len(data.class_names)) == (kind.name, 10, 10)
    assert idx.SOURCES[kind.name].find(tmp_path) == str(tmp_path / place)


def test_dotted_spelling_and_gzip_without_the_ending_load(tmp_path: Path) -> None:
    _write(tmp_path, dotted=True)
    path = tmp_path / "train-images.idx3-ubyte"
    path.write_bytes(gzip.compress(path.read_bytes(), 1))
    assert len(idx.load("train", tmp_path, kind=MNIST)) == 60


def test_missing_labels_are_named(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=rf"t10k-labels-idx1-ubyte .*not found in {tmp_path}; mnist: .*--data-dir"):
        idx.load("test", tmp_path, kind=MNIST)
    assert idx.SOURCES["mnist"].find(tmp_path) is None


HEADER, PIXELS = 16, 60 * 784
DAMAGES = {
    "is truncated: .* bytes, expected": lambda raw: raw[:-1],
    "has bytes to spare": lambda raw: raw + b"\0",
    "not an idx file of 3 dimensions: it begins with '00000801'": lambda raw: b"\0\0\x08\x01" + raw[4:],
    "not an idx file.*begins with '3c68746d'": lambda raw: b"<html>",
    "header says shape \\[61, 28, 28\\], expected \\[60, 28, 28\\]": lambda raw: raw[:7] + b"\x3d" + raw[8:],
    "header says shape \\[60\\], expected": lambda raw: raw[:8],
    "begins with ''": lambda raw: b"",
}


@pytest.mark.parametrize("message", DAMAGES)
@pytest.mark.parametrize("packed", [False, True])
def test_damage_is_named(message: str, packed: bool, tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    raw = DAMAGES[message](path.read_bytes())
    path.write_bytes(gzip.compress(raw, 1) if packed else raw)
    with pytest.raises(DataError, match=f"train-images-idx3-ubyte.*{message}"):
        idx.load("train", tmp_path, kind=MNIST)


@pytest.mark.parametrize("damage", ["truncate", "checksum"])
def test_damaged_gzip_is_named(damage: str, tmp_path: Path) -> None:
    _write(tmp_path, suffix=".gz")
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    raw = bytearray(path.read_bytes())
    if damage == "truncate":
        raw = raw[:-12]
    else:
        raw[-8] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz is truncated or corrupt gzip"):
        idx.load("train", tmp_path, kind=MNIST)


def test_label_above_nine_is_named(tmp_path: Path) -> None:
    labels = np.arange(60) % 10
    labels[13] = 11
    _write(tmp_path, labels=labels)
    with pytest.raises(DataError, match=r"label 13 is 11, expected 0\.\.9"):
        idx.load("train", tmp_path, kind=MNIST)


def test_one_dataset_under_the_others_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    balanced = dataclasses.replace(FASHION_MNIST, label_counts={"train": (6,) * 10, "test": (4,) * 10})
    monkeypatch.setattr(idx, "KINDS", (MNIST, balanced))
    _write(tmp_path, labels=np.arange(60) % 10)
    with pytest.raises(DataError, match=r"holds the labels of fashion_mnist, not of mnist.*its own folder MNIST/raw/"):
        idx.load("train", tmp_path, kind=MNIST)
    assert len(idx.load("train", tmp_path, kind=balanced)) == 60


def test_known_label_counts_add_up() -> None:
    for kind in (MNIST, FASHION_MNIST):
        assert {split: sum(counts) for split, counts in kind.label_counts.items()} == {"train": 60_000, "test": 10_000}
