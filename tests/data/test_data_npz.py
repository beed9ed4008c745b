from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatrock.core.errors import DataError, StateError
from flatrock.data import npz
from flatrock.data.dataset import Dataset

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


# Images without labels, and writing


@pytest.mark.parametrize("label", [None, np.full(5, -1)], ids=["left out", "minus one"])
def test_images_without_labels(label: Any, tmp_path: Path) -> None:
    data = npz.load_unlabelled(_write(tmp_path / "more.npz", label=label), num_classes=7)
    assert data.y.tolist() == [-1] * 5
    assert data.x.shape == (5, 3, 4, 6)
    assert data.num_classes == 7


def test_labels_that_are_there_are_not_thrown_away(tmp_path: Path) -> None:
    path = _write(tmp_path / "extra.npz")
    with pytest.raises(DataError, match=r"extra\.npz already has 4 labels; leave `label` out"):
        npz.load_unlabelled(path, num_classes=3)
    with pytest.raises(DataError, match="already has 4 labels"):
        npz.load_unlabelled(path, num_classes=2)


@pytest.mark.parametrize("message", [m for m in BAD if "image" in BAD[m]])
def test_wrong_images_without_labels_are_named(message: str, tmp_path: Path) -> None:
    path = _write(tmp_path / "more.npz", **{**BAD[message], "label": None})
    with pytest.raises(DataError, match=message):
        npz.load_unlabelled(path, num_classes=3)


def test_labels_that_say_nothing_must_still_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="label must be 5 integers, one per image, got float64"):
        npz.load_unlabelled(_write(tmp_path / "a.npz", label=np.full(5, -1.0)), num_classes=3)
    with pytest.raises(DataError, match=r"label must be 5 integers, one per image, got int64 \[4\]"):
        npz.load_unlabelled(_write(tmp_path / "b.npz", label=np.full(4, -1)), num_classes=3)


def test_an_image_that_is_a_number_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "more.npz", image=np.array(3, dtype=np.uint8), label=None)
    with pytest.raises(DataError, match=r"image must be uint8 \[M, H, W, C\], got uint8 \[\]"):
        npz.load_unlabelled(path, num_classes=3)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    data = npz.load(_write(tmp_path / "a.npz"), num_classes=3)
    npz.save(tmp_path / "b.npz", data, confidence=np.linspace(0, 1, 5), provenance=np.array('{"run": "r"}'))
    again = npz.load(tmp_path / "b.npz", num_classes=3)
    assert torch.equal(again.x, data.x)
    assert torch.equal(again.y, data.y)
    with np.load(tmp_path / "b.npz", allow_pickle=False) as content:
        assert content["image"].tolist() == IMAGE.tolist()
        assert content["confidence"].tolist() == [0, 0.25, 0.5, 0.75, 1]
        assert str(content["provenance"]) == '{"run": "r"}'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    data = npz.load(_write(tmp_path / "a.npz"), num_classes=3)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateError, match=r"could not write .*b\.npz"):
        npz.save(tmp_path / "file" / "b.npz", data)
    floats = Dataset("floats", torch.zeros(2, 1, 2, 2), torch.zeros(2, dtype=torch.int64), 3)
    with pytest.raises(DataError, match=r"'floats': only uint8 images can be written, got torch\.float32"):
        npz.save(tmp_path / "c.npz", floats)
