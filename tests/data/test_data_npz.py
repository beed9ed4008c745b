from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatrock.core.errors import DataError
from flatrock.data import npz

IMAGE = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3)).astype(np.uint8)


def _write(path: Path, **changes: Any) -> Path:
    content = {"image": IMAGE, "label": np.array([0, 1, -1, 2, 1])} | changes
    np.savez(path, **{k: v for k, v in content.items() if v is not None})
    return path


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.int32])
def test_images_become_channel_first_and_unlabelled_stays(dtype: type, tmp_path: Path) -> None:
    path = _write(tmp_path / "extra.npz", label=np.array([0, 1, -1, 2, 1], dtype=dtype))
    data = npz.load(path, num_classes=3)
    assert data.x.shape == (5, 3, 4, 6)
    assert int(data.x[2, 1, 3, 5]) == IMAGE[2, 3, 5, 1]
    assert data.x.is_contiguous()
    assert data.y.tolist() == [0, 1, -1, 2, 1]
    assert (data.name, data.num_classes) == ("extra.npz", 3)


BAD: dict[str, dict[str, Any]] = {
    "lacks an array .*image": {"image": None},
    "lacks an array .*label": {"label": None},
    r"image must be uint8 \[M, H, W, C\], got float32": {"image": IMAGE.astype(np.float32)},
    r"image must be uint8 \[M, H, W, C\], got uint8 \[5, 72\]": {"image": IMAGE.reshape(5, 72)},
    r"label must be 5 integers, one per image, got int64 \[4\]": {"label": np.zeros(4, dtype=np.int64)},
    "label must be 5 integers, one per image, got float64": {"label": np.zeros(5)},
    "label 3 of sample 4 is outside -1..2": {"label": np.array([0, 1, 2, 0, 3])},
    "label -2 of sample 0 is outside -1..2": {"label": np.array([-2, 1, 2, 0, 1])},
    "is empty": {"image": IMAGE[:0], "label": np.zeros(0, dtype=np.int64)},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_content_is_named(message: str, tmp_path: Path) -> None:
    path = _write(tmp_path / "extra.npz", **BAD[message])
    with pytest.raises(DataError, match=message):
        npz.load(path, num_classes=3)


class Bomb:
    """Pickled code; loading must refuse it rather than run it."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def test_pickled_objects_are_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = _write(tmp_path / "extra.npz", label=np.array([Bomb(str(mark))] * 5, dtype=object))
    with pytest.raises(DataError, match=r"extra\.npz is truncated, corrupt or not an \.npz file"):
        npz.load(path, num_classes=3)
    assert not mark.exists()


@pytest.mark.parametrize("damage", ["truncate", "header", "empty", "flip", "npy"])
def test_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    path = _write(tmp_path / "extra.npz")
    raw = bytearray(path.read_bytes())
    if damage == "truncate":
        raw = raw[:300]
    elif damage == "header":
        raw[:4] = b"zzzz"
    elif damage == "empty":
        raw = bytearray()
    elif damage == "flip":
        raw[250] ^= 0xFF
    path.write_bytes(bytes(raw))
    if damage == "npy":
        with path.open("wb") as f:
            np.save(f, IMAGE)
    with pytest.raises(DataError, match=r"extra\.npz is truncated, corrupt or not an \.npz file.*fresh copy"):
        npz.load(path, num_classes=3)


def test_missing_file_says_what_it_should_hold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.npz not found; .*`image` uint8 .*not downloadable here"):
        npz.load(tmp_path / "absent.npz", num_classes=3)
