"""Arrays of one's own in train.npz and test.npz."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatrock.core.errors import DataError
from flatrock.data import npz
from flatrock.data.catalog import data_options, found, load_data
from flatrock.data.dataset import scaled

RNG = np.random.default_rng(0)
LABEL = np.arange(12) % 3
IMAGE = RNG.integers(0, 256, (12, 4, 6, 3)).astype(np.uint8)
POINTS = RNG.random((12, 5))


def write(folder: Path, split: str = "train", **arrays: Any) -> None:
    """A sound file with these arrays in the place of its own; None leaves one out."""
    content = {"x": POINTS, "label": LABEL} | arrays
    np.savez(folder / f"{split}.npz", **{k: v for k, v in content.items() if v is not None})


def refused(folder: Path, split: Any = "train") -> str:
    with pytest.raises(DataError) as raised:
        load_data("npz", split, folder=folder)
    return str(raised.value)


def test_images_become_channel_first_bytes(tmp_path: Path) -> None:
    write(tmp_path, x=None, image=IMAGE)
    data = load_data("npz", "train", folder=tmp_path)
    assert (data.x.dtype, data.x.shape) == (torch.uint8, (12, 3, 4, 6))
    assert int(data.x[2, 1, 3, 5]) == IMAGE[2, 3, 5, 1]
    assert data.y.tolist() == LABEL.tolist()
    assert (data.name, data.num_classes, data.class_names) == ("npz", 3, ())
    extra = npz.load(tmp_path / "train.npz", num_classes=3)
    assert data.fingerprint() == extra.fingerprint(), "the same file can be data.extra, too"


def test_grey_images_get_a_channel(tmp_path: Path) -> None:
    write(tmp_path, x=None, image=IMAGE[..., 0])
    data = load_data("npz", "train", folder=tmp_path)
    assert data.input_shape == (1, 4, 6)
    assert np.array_equal(data.x[:, 0].numpy(), IMAGE[..., 0])


@pytest.mark.parametrize("shape", [(5,), (3, 4, 4), (2, 7), (1, 2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_of_any_shape_stay_as_they_are(shape: tuple[int, ...], dtype: type, tmp_path: Path) -> None:
    x = RNG.random((12, *shape)).astype(dtype)
    write(tmp_path, x=x)
    data = load_data("npz", "train", folder=tmp_path)
    assert data.input_shape == shape
    assert np.array_equal(data.images(torch.arange(12)).numpy(), x.astype(np.float32))


def test_bytes_and_the_floats_they_stand_for_are_the_same_inputs(tmp_path: Path) -> None:
    write(tmp_path, x=None, image=IMAGE)
    write(tmp_path, "test", x=IMAGE.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255))
    train, test = (load_data("npz", split, folder=tmp_path) for split in ("train", "test"))
    assert torch.equal(scaled(train.x[:]), test.x[:])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_labels_of_any_whole_type(dtype: type, tmp_path: Path) -> None:
    write(tmp_path, label=LABEL.astype(dtype))
    assert load_data("npz", "train", folder=tmp_path).y.dtype == torch.int64


def test_test_split_keeps_the_numbering_of_train(tmp_path: Path) -> None:
    write(tmp_path, classes=np.array(["a", "b", "c"]))
    write(tmp_path, "test", x=POINTS[:2], label=np.array([1, 0]))
    test = load_data("npz", "test", folder=tmp_path)
    assert (test.num_classes, test.class_names, len(test)) == (3, ("a", "b", "c"), 2)


@pytest.mark.parametrize(("classes", "count"), [(None, 2), (np.array(["a", "b", "c", "d"]), 4)])
def test_test_split_alone_knows_its_classes_by_names_or_labels(classes: Any, count: int, tmp_path: Path) -> None:
    write(tmp_path, "test", x=POINTS[:2], label=np.array([1, 1]), classes=classes)
    assert load_data("npz", "test", folder=tmp_path).num_classes == count
    assert found("npz", tmp_path) == f"{tmp_path} (test.npz)"
    assert "train.npz not found in" in refused(tmp_path, "train")


def test_train_alone_is_enough_to_train(tmp_path: Path) -> None:
    write(tmp_path)
    assert len(load_data("npz", "train", folder=tmp_path)) == 12
    assert "test.npz not found in" in refused(tmp_path, "test")
    assert data_options("npz") == []


WRONG: dict[str, dict[str, Any]] = {
    "holds neither `image` nor `x`; an .npz file": {"x": None},
    "holds both `image` and `x`; an .npz file": {"image": IMAGE},
    "lacks `label`; an .npz file": {"label": None},
    "floats in [0, 1], got int64; convert them, 0..255 by": {"x": POINTS.astype(np.int64)},
    "`x` holds uint8 [12, 4, 6, 3]; `image` is for bytes": {"x": IMAGE},
    "`image` holds float64 [12, 4, 6, 3]; `image` is for bytes": {"x": None, "image": IMAGE / 255},
    "inputs must be bytes (uint8) or floats in [0, 1], got bool": {"x": POINTS > 0.5},
    "must be [N, H, W, C], or [N, H, W] if grey, got [12, 72]": {"x": None, "image": IMAGE.reshape(12, 72)},
    "looks like [N, C, H, W]; write image.transpose(0, 2, 3, 1)": {"x": None, "image": IMAGE.transpose(0, 3, 1, 2)},
    "inputs must be [samples, ...], at least one of each, got shape [12, 0]": {"x": POINTS[:, :0]},
    "inputs must be [samples, ...], at least one of each, got shape [12]": {"x": POINTS[:, 0]},
    "2 of 12 inputs hold NaN or infinity (first: sample 3)": {
        "x": np.where(np.isin(np.arange(12), (3, 7))[:, None], np.nan, POINTS)
    },
    "inputs must lie in [0, 1], got [0, 255]; divide by 255": {"x": np.eye(12) * 255},
    "inputs must lie in [0, 1], got [-1, 1]; scale them": {"x": np.eye(12) * 2 - 1},
    "labels must be whole numbers, one per input, got float64 [12]; write label.astype": {"label": LABEL / 1},
    "labels must be whole numbers, one per input, got int64 [12, 3]; write label.argmax(1)": {
        "label": np.eye(3, dtype=int)[LABEL]
    },
    "12 inputs, but 11 labels": {"label": LABEL[:11]},
    "label -1 of sample 2: classes are numbered from 0": {"label": np.where(np.arange(12) == 2, -1, LABEL)},
    "no sample has label 0, but classes are 0..3; number them": {"label": LABEL + 1},
    "no sample has label 1, but classes are 0..2; number them": {"label": LABEL // 2 * 2},
    "no sample has label 3, but classes are 0..1000000000000": {"label": np.where(np.arange(12) == 5, 10**12, LABEL)},
    "there is one class": {"label": LABEL * 0},
    "no sample has label 3, but classes are 0..3": {"classes": np.array(list("abcd"))},
    "label 2 of sample 2 (4 such), but there are 2 names": {"classes": np.array(list("ab"))},
    "`classes` names 'a' twice": {"classes": np.array(list("aba"))},
    "`classes` must be a list of text, got int64 [3]": {"classes": np.arange(3)},
}


@pytest.mark.parametrize("fault", WRONG)
def test_faults_are_named_with_file_and_cure(fault: str, tmp_path: Path) -> None:
    write(tmp_path, **WRONG[fault])
    said = refused(tmp_path)
    assert fault in said
    assert str(tmp_path / "train.npz") in said
    assert said.startswith("data 'npz' cannot be used: ")


def test_every_fault_of_both_files_is_told_before_training(tmp_path: Path) -> None:
    write(tmp_path, x=POINTS * 2, label=LABEL - 1)
    write(tmp_path, "test", x=np.full((12, 5), np.nan), classes=np.arange(3))
    said = refused(tmp_path)
    for fault in ("inputs must lie in [0, 1]", "label -1 of sample 0", "`classes` must be"):
        assert f"  - {tmp_path}" in said
        assert fault in said


def test_faults_of_inputs_do_not_hide_those_of_labels_nor_each_other(tmp_path: Path) -> None:
    x = POINTS * 2
    x[3, 1] = np.nan
    write(tmp_path, x=x, label=LABEL + 1)
    write(tmp_path, "test")
    said = refused(tmp_path)
    for fault in ("1 of 12 inputs hold NaN", "inputs must lie in [0, 1], got", "no sample has label 0"):
        assert said.count(fault) == 1, said


BETWEEN: dict[str, dict[str, Any]] = {
    "has inputs [5], ": {"x": POINTS[:, :4]},
    "label 3 of sample 11 (1 such), but": {"label": np.where(np.arange(12) == 11, 3, LABEL)},
    "name other classes (a, b, c; c, b, a)": {"classes": np.array(list("cba"))},
    "12 of 12 inputs hold NaN": {"x": POINTS * np.nan},
}


@pytest.mark.parametrize("fault", BETWEEN)
def test_train_and_test_must_agree(fault: str, tmp_path: Path) -> None:
    write(tmp_path, classes=np.array(list("abc")))
    write(tmp_path, "test", **BETWEEN[fault])
    said = refused(tmp_path)
    assert fault in said
    assert "test.npz" in said


def test_inputs_to_train_on_are_not_read_to_test(tmp_path: Path) -> None:
    write(tmp_path, x=POINTS * np.nan)
    write(tmp_path, "test")
    assert len(load_data("npz", "test", folder=tmp_path)) == 12
    assert "hold NaN" in refused(tmp_path, "train")


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.mark,)


@pytest.mark.parametrize("key", ["x", "label", "classes"])
def test_pickled_objects_are_refused_and_not_run(key: str, tmp_path: Path) -> None:
    write(tmp_path, **{key: np.array([Bomb(tmp_path / "ran")] * 12, dtype=object)})
    said = refused(tmp_path)
    assert "Object arrays cannot be loaded" in said
    assert "plain arrays of numbers" in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a zip", None])
def test_damaged_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "train.npz"
    path.write_bytes(path.read_bytes()[:200] if content is None else content)
    assert f"{path} is truncated, corrupt or not an .npz file" in refused(tmp_path)
