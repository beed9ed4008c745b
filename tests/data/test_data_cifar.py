from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from flatrock.core.errors import ConfigError, DataError
from flatrock.data import cifar
from flatrock.data.cifar import CIFAR10, CIFAR100, Layout

COUNTS = {("cifar10", "train"): 20, ("cifar10", "test"): 30, ("cifar100", "train"): 40, ("cifar100", "test"): 10}
BOTH = pytest.mark.parametrize("layout", [CIFAR10, CIFAR100], ids=lambda layout: layout.name)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few records per file, so that fakes are quick to write; the check stays exact."""
    monkeypatch.setattr(cifar, "RECORDS", COUNTS)


def _records(layout: Layout, split: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    n = COUNTS[layout.name, split]
    labels = np.stack([rng.integers(0, limit, n) for limit in layout.label_limits], axis=1)
    return np.concatenate([labels, rng.integers(0, 256, (n, 3072))], axis=1).astype(np.uint8)


def _write(layout: Layout, folder: Path) -> dict[str, np.ndarray]:
    """All files of the layout; returns the records of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {}
    for split in ("train", "test"):
        files = [_records(layout, split, seed) for seed, _ in enumerate(layout.files[split])]
        for name, records in zip(layout.files[split], files, strict=True):
            records.tofile(folder / name)
        content[split] = np.concatenate(files)
    return content


def _pack(source: Path, archive: Path, prefix: str) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(source.iterdir()):
            tar.add(path, f"{prefix}/{path.name}")


@BOTH
@pytest.mark.parametrize("place", ["subfolder", "plain"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_records_become_images_and_fine_labels(layout: Layout, place: str, split: str, tmp_path: Path) -> None:
    folder = tmp_path / layout.subfolder if place == "subfolder" else tmp_path
    records = _write(layout, folder)[split]
    data = cifar.load(split, tmp_path, layout=layout)
    labels = len(layout.label_limits)
    assert data.x.dtype == torch.uint8
    assert data.x.shape == (len(records), 3, 32, 32)
    assert data.y.tolist() == records[:, labels - 1].tolist()
    # Channel first, then rows: pixel (c, h, w) is byte 1024 c + 32 h + w of the image.
    assert int(data.x[3, 1, 2, 5]) == records[3, labels + 1024 + 2 * 32 + 5]
    assert np.array_equal(data.x.flatten(1).numpy(), records[:, labels:])
    assert (data.name, data.num_classes) == (layout.name, layout.num_classes)
    assert len(data.class_names) == layout.num_classes == len(set(data.class_names))
    assert cifar.SOURCES[layout.name].find(tmp_path) == str(folder)


@BOTH
def test_archive_is_unpacked_once_and_gives_the_same(layout: Layout, tmp_path: Path) -> None:
    _write(layout, tmp_path / "made")
    archive = tmp_path / layout.archive.filename
    _pack(tmp_path / "made", archive, f"./{layout.subfolder}")
    assert cifar.SOURCES[layout.name].find(tmp_path) == str(archive)
    data = cifar.load("test", tmp_path, layout=layout)
    assert data.fingerprint() == cifar.load("test", tmp_path / "made", layout=layout).fingerprint()
    assert sorted(p.name for p in (tmp_path / layout.subfolder).iterdir()) == sorted(layout.all_files)
    archive.unlink()
    assert len(cifar.load("train", tmp_path, layout=layout)) == COUNTS[layout.name, "train"] * len(
        layout.files["train"]
    )
    assert not list(tmp_path.glob(".unpack-*"))


def test_archive_can_neither_escape_nor_add_files(tmp_path: Path) -> None:
    _write(CIFAR100, tmp_path / "made")
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / CIFAR100.archive.filename, "w:gz") as tar:
        for name in ("../outside.bin", "/tmp/flatrock-outside.bin", "cifar-100-binary/surplus.bin"):
            entry = tarfile.TarInfo(name)
            entry.size = 4
            tar.addfile(entry, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("cifar-100-binary/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        for path in sorted((tmp_path / "made").iterdir()):
            tar.add(path, f"cifar-100-binary/{path.name}")
    cifar.load("train", tmp_path / "data", layout=CIFAR100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "made"]
    assert sorted(p.name for p in (tmp_path / "data" / "cifar-100-binary").iterdir()) == ["test.bin", "train.bin"]
    assert not Path("/tmp/flatrock-outside.bin").exists()


def test_expected_member_that_is_a_link_counts_as_missing(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / CIFAR100.archive.filename, "w:gz") as tar:
        for name in CIFAR100.all_files:
            link = tarfile.TarInfo(f"cifar-100-binary/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
    with pytest.raises(DataError, match=r"lacks cifar-100-binary/train\.bin, .*fresh copy"):
        cifar.load("train", tmp_path, layout=CIFAR100)


@pytest.mark.parametrize("damage", ["truncate", "flip", "not a tar"])
def test_damaged_archive_leaves_nothing_behind(damage: str, tmp_path: Path) -> None:
    _write(CIFAR100, tmp_path / "made")
    archive = tmp_path / CIFAR100.archive.filename
    _pack(tmp_path / "made", archive, CIFAR100.subfolder)
    raw = bytearray(archive.read_bytes())
    if damage == "truncate":
        raw = raw[: len(raw) // 2]
    elif damage == "flip":
        raw[-6] ^= 0xFF
    else:
        raw = bytearray(b"<html>not found</html>")
    archive.write_bytes(bytes(raw))
    with pytest.raises(DataError, match=rf"{archive.name} is truncated or corrupt.*fresh copy"):
        cifar.load("train", tmp_path, layout=CIFAR100)
    assert sorted(p.name for p in tmp_path.iterdir()) == [archive.name, "made"]


def test_truncated_file_is_named_with_its_size(tmp_path: Path) -> None:
    _write(CIFAR10, tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=rf"data_batch_3\.bin.*{20 * 3073 - 10} bytes.*multiple of 3073.*toronto"):
        cifar.load("train", tmp_path, layout=CIFAR10)


def test_missing_records_are_counted(tmp_path: Path) -> None:
    _write(CIFAR10, tmp_path)
    path = tmp_path / "test_batch.bin"
    path.write_bytes(path.read_bytes()[: 29 * 3073])
    with pytest.raises(DataError, match=r"test_batch\.bin holds 29 records, expected 30; .*fresh copy"):
        cifar.load("test", tmp_path, layout=CIFAR10)


def test_other_dataset_under_the_right_name_is_refused(tmp_path: Path) -> None:
    _write(CIFAR100, tmp_path)
    (tmp_path / "train.bin").write_bytes(bytes(40 * 3073))
    with pytest.raises(DataError, match=r"train\.bin.*not a cifar100 file.*multiple of 3074"):
        cifar.load("train", tmp_path, layout=CIFAR100)


@pytest.mark.parametrize(
    ("layout", "column", "value", "allowed"), [(CIFAR10, 0, 10, 9), (CIFAR100, 0, 20, 19), (CIFAR100, 1, 100, 99)]
)
def test_label_out_of_range_is_named(layout: Layout, column: int, value: int, allowed: int, tmp_path: Path) -> None:
    _write(layout, tmp_path)
    name = layout.files["test"][0]
    records = _records(layout, "test", 0)
    records[7, column] = value
    records.tofile(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}: record 7 has label {value}, expected 0..{allowed}"):
        cifar.load("test", tmp_path, layout=layout)


def test_missing_file_among_others_is_named(tmp_path: Path) -> None:
    _write(CIFAR10, tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(
        DataError, match=r"data_batch_4\.bin \(the other 4 files are there\) not found in .*batches-bin"
    ):
        cifar.load("train", tmp_path, layout=CIFAR10)
    assert cifar.SOURCES["cifar10"].find(tmp_path) is None
    assert len(cifar.load("test", tmp_path, layout=CIFAR10)) == 30


def test_nothing_there_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"cifar-10-binary\.tar\.gz not found in {tmp_path}.*toronto.*--data-dir"):
        cifar.load("train", tmp_path, layout=CIFAR10)


def test_unknown_split_lists_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown split 'validation'; known: test, train"):
        cifar.load("validation", tmp_path, layout=CIFAR10)  # type: ignore[arg-type]


@pytest.mark.local
def test_real_cifar10(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.environ.get("FLATROCK_TEST_DATA")
    if not folder:
        pytest.skip("set FLATROCK_TEST_DATA to a folder with CIFAR-10")
    monkeypatch.undo()
    for split, n, per_class in (("train", 50_000, 5000), ("test", 10_000, 1000)):
        data = cifar.load(split, Path(folder), layout=CIFAR10)  # type: ignore[arg-type]
        assert data.x.shape == (n, 3, 32, 32)
        assert data.y.bincount().tolist() == [per_class] * 10
        if split == "train":
            mean = data.x.float().mean((0, 2, 3)) / 255
            torch.testing.assert_close(mean, torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-4, rtol=0)
