from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from flatrock.core.errors import DataError
from flatrock.data import svhn


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svhn, "RECORDS", {"train": 12, "test": 10})


def _content(n: int) -> dict[str, Any]:
    pixels = np.random.default_rng(n).integers(0, 256, (32, 32, 3, n)).astype(np.uint8)
    return {"X": pixels, "y": (np.arange(n) % 10 + 1).astype(np.uint8)[:, None]}


def _write(folder: Path, n: int = 10, name: str = "test_32x32.mat", **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    content = {k: v for k, v in (_content(n) | changes).items() if v is not None}
    savemat(folder / name, content, do_compression=True)
    return folder / name


@pytest.mark.parametrize("place", ["", "svhn", "SVHN"])
def test_images_are_channel_first_and_ten_means_zero(place: str, tmp_path: Path) -> None:
    _write(tmp_path / place)
    data = svhn.load("test", tmp_path)
    assert data.x.shape == (10, 3, 32, 32)
    assert int(data.x[4, 2, 7, 30]) == _content(10)["X"][7, 30, 2, 4]
    assert data.y.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert svhn.SOURCE.find(tmp_path) is None
    _write(tmp_path / place, 12, "train_32x32.mat")
    assert len(svhn.load("train", tmp_path)) == 12
    assert svhn.SOURCE.find(tmp_path) == str(tmp_path / place)


BAD: dict[str, dict[str, Any]] = {
    "holds 9 images and 9 labels, expected 10": _content(9),
    "holds 10 images and 9 labels, expected 10": {"y": _content(9)["y"]},
    "image 3 has label 11, expected 1..10": {"y": np.array([[1, 2, 3, 11, 5, 6, 7, 8, 9, 10]]).T},
    "image 0 has label 0, expected 1..10": {"y": np.arange(10)[:, None]},
    "image 1 has label nan": {"y": np.array([[1, np.nan, 3, 4, 5, 6, 7, 8, 9, 10]]).T},
    "lacks the variable X": {"X": None},
    "lacks the variable y": {"y": None},
    r"X must be uint8 \[32, 32, 3, N\], got float64": {"X": _content(10)["X"] / 255},
    r"X must be uint8 \[32, 32, 3, N\], got uint8 \[10, 3, 32, 32\]": {"X": _content(10)["X"].transpose(3, 2, 0, 1)},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_content_is_named(message: str, tmp_path: Path) -> None:
    _write(tmp_path, **BAD[message])
    with pytest.raises(DataError, match=rf"test_32x32\.mat.*{message}.*fresh copy from http"):
        svhn.load("test", tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "header", "empty", "flip"])
def test_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    path = _write(tmp_path)
    raw = bytearray(path.read_bytes())
    if damage == "truncate":
        raw = raw[: len(raw) // 2]
    elif damage == "header":
        raw[:200] = bytes(200)
    elif damage == "empty":
        raw = bytearray()
    else:
        raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(bytes(raw))
    with pytest.raises(
        DataError, match=r"test_32x32\.mat is truncated, corrupt or not a MATLAB file|lacks the variable"
    ):
        svhn.load("test", tmp_path)


def test_missing_file_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"train_32x32\.mat not found in {tmp_path}; svhn: .*ufldl.*--data-dir"):
        svhn.load("train", tmp_path)
