from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from flatrock.core.errors import ConfigError, DataError
from flatrock.core.rng import Seed
from flatrock.data import folder, imagenet
from flatrock.data.augment import Augmentation
from flatrock.data.catalog import found
from flatrock.data.dataset import Dataset, check
from flatrock.data.loader import READ_AHEAD, Batch, TensorLoader, in_background
from flatrock.data.pictures import Form, Pictures, read_all

CLASSES = ("ant", "bee", "cat")


def _noise(height: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _save(path: Path, pixels: np.ndarray[Any, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Images of many sizes, some wide and some high."""
    for split in ("train", "val"):
        for label, name in enumerate(CLASSES):
            for i in range(5):
                _save(tmp_path / split / name / f"{i}.png", _noise(9 + 3 * i, 20 - 2 * i, 10 * label + i))
    return tmp_path


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is small enough to be held in memory."""
    monkeypatch.setattr(folder, "HELD", 0)


def test_an_image_as_long_as_asked_for_is_only_cut(tmp_path: Path) -> None:
    pixels = _noise(8, 13)
    path = _save(tmp_path / "wide.png", pixels)
    assert np.array_equal(Form(size=4, resize=8).pixels(path), pixels[2:6, 4:8].transpose(2, 0, 1))  # 4.5 is 4
    assert np.array_equal(Form(size=8).pixels(path), pixels[:, 2:10].transpose(2, 0, 1))  # 2.5 is 2
    high = _save(tmp_path / "high.png", pixels.transpose(1, 0, 2))
    assert np.array_equal(Form(size=8).pixels(high), pixels.transpose(2, 1, 0)[:, 2:10])
    grey = Form(channels=1, size=8).pixels(path)
    assert grey.shape == (1, 8, 8)
    assert np.array_equal(grey[0], np.asarray(Image.fromarray(pixels).convert("L"))[:, 2:10])


@pytest.mark.parametrize(("height", "width", "size", "resize"), [(30, 41, 12, 16), (41, 30, 16, None), (5, 7, 12, 14)])
def test_resizing_is_the_bilinear_filter_that_averages(
    tmp_path: Path, height: int, width: int, size: int, resize: int | None
) -> None:
    """Against torch's; both round to bytes, once or twice."""
    pixels = _noise(height, width)
    found = Form(size=size, resize=resize).pixels(_save(tmp_path / "a.png", pixels))
    short = resize or size
    sides = [
        short if side == min(height, width) else int(short * side / min(height, width)) for side in (height, width)
    ]
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
    whole = F.interpolate(image, size=sides, mode="bilinear", antialias=True)[0]
    top, left = (round((side - size) / 2) for side in sides)
    expected = whole[:, top : top + size, left : left + size]
    assert found.shape == (3, size, size)
    assert float((torch.tensor(found).double() - expected).abs().max()) < 1.51


def test_forms_that_make_no_sense_are_refused() -> None:
    for options, message in (
        ({"channels": 2}, "channels must be 1"),
        ({"size": 0}, "an image's size must be a whole number >= 1, got 0"),
        ({"size": "8"}, "size must be a whole number >= 1, got '8'"),
        ({"size": 8, "resize": 7}, "resize must be a whole number >= 8, got 7"),
        ({"resize": 7}, "give its size, too"),
    ):
        with pytest.raises(ConfigError, match=message):
            Form(**options)
    with pytest.raises(ConfigError, match=r"give data\.size"):
        Pictures(Path(), ["a.png"], Form())


def test_pictures_are_the_tensor_that_reading_them_all_makes(root: Path) -> None:
    names = [f"{name}/{i}.png" for name in CLASSES for i in range(5)]
    pictures = Pictures(root / "train", names, Form(size=6))
    whole = read_all([root / "train" / name for name in names], Form(size=6))
    assert pictures.shape == whole.shape == (15, 3, 6, 6)
    assert (len(pictures), pictures.dtype, pictures.device) == (15, whole.dtype, whole.device)
    order = torch.tensor([14, 0, 7, 7])
    assert torch.equal(pictures[order], whole[order])
    assert pictures[torch.arange(0)].shape == (0, 3, 6, 6)
    some = pictures.pick(order)
    assert some.names == ["cat/4.png", "ant/0.png", "bee/2.png", "bee/2.png"]
    assert torch.equal(some[torch.tensor([2, 0])], whole[torch.tensor([7, 14])])


def test_large_splits_stay_in_their_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = folder.load("train", root, size=6)
    monkeypatch.setattr(folder, "HELD", held.x.numel() if isinstance(held.x, torch.Tensor) else -1)
    assert isinstance(folder.load("train", root, size=6).x, torch.Tensor)
    monkeypatch.setattr(folder, "HELD", folder.HELD - 1)
    data = folder.load("train", root, size=6)
    assert isinstance(data.x, Pictures)
    everything = torch.arange(15)
    assert torch.equal(data.images(everything), held.images(everything))
    assert torch.equal(data.y, held.y)
    assert (data.input_shape, data.class_names, len(data)) == ((3, 6, 6), CLASSES, 15)
    some = data.subset(torch.tensor([9, 2])).to("cpu").subset(torch.tensor([1]))
    assert isinstance(some.x, Pictures)
    assert (some.ids.tolist(), some.y.tolist()) == ([2], [0])
    assert torch.equal(some.images(torch.tensor([0])), held.images(torch.tensor([2])))


@pytest.mark.usefixtures("in_files")
def test_images_of_one_size_that_is_not_said_are_held_as_before(tmp_path: Path) -> None:
    for split in ("train", "test"):
        _save(tmp_path / split / "ant" / "1.png", _noise(4, 5))
    assert isinstance(folder.load("train", tmp_path).x, torch.Tensor)


def test_val_takes_the_place_of_a_test_folder_that_is_not_there(root: Path) -> None:
    assert folder.SOURCE.find(root) == f"{root} (train and val)"
    test = folder.load("test", root, size=6)
    assert test.y.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    _save(root / "test" / "cat" / "1.png", _noise(6, 6))
    assert folder.load("test", root, size=6).y.tolist() == [2]


@pytest.mark.usefixtures("in_files")
def test_what_a_dataset_in_files_is_known_by(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = folder.load("train", root, size=6).fingerprint()
    assert folder.load("train", root, size=6).fingerprint() == known
    assert folder.load("train", root, size=6, resize=7).fingerprint() != known
    monkeypatch.setattr("flatrock.data.dataset.LOOKED_AT", 3)
    few = folder.load("train", root, size=6).fingerprint()
    assert few != known
    (root / "train" / "ant" / "1.png").write_bytes(b"")  # not among the first, the middle and the last
    assert folder.load("train", root, size=6).fingerprint() == few
    _save(root / "train" / "cat" / "4.png", _noise(6, 6))
    assert folder.load("train", root, size=6).fingerprint() != few
    renamed = folder.load("train", root, size=6).fingerprint()
    (root / "train" / "ant" / "1.png").rename(root / "train" / "ant" / "11.png")
    assert folder.load("train", root, size=6).fingerprint() != renamed


@pytest.mark.usefixtures("in_files")
def test_damaged_files_are_named_when_they_are_met_and_all_at_once_on_request(root: Path) -> None:
    data = folder.load("train", root, size=6)
    for name in ("ant/3.png", "cat/0.png"):
        (root / "train" / name).write_bytes(b"no image")
    with pytest.raises(DataError, match=r"ant/3\.png cannot be decoded .*--every-image` finds all such files"):
        data.images(torch.arange(15))
    assert data.images(torch.tensor([0, 1])).shape == (2, 3, 6, 6)
    progress = _Counting()
    told = folder.damaged("train", root, progress, size=6)
    assert [fault.partition(" cannot")[0][-9:] for fault in told] == ["ant/3.png", "cat/0.png"]
    assert progress.done == progress.total == 15
    assert folder.damaged("test", root / "elsewhere", progress) == []


def test_of_a_very_long_image_the_middle_alone_is_computed(tmp_path: Path) -> None:
    """Resized as a whole it would be 5,120,000 pixels long: gigabytes."""
    pixels = np.repeat(_noise(1, 25), 800, axis=1)
    script = "import resource, sys; from pathlib import Path; from flatrock.data.pictures import Form\n"
    script += "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    script += "found = Form(size=224, resize=256).pixels(Path(sys.argv[1]))\n"
    script += "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    script += "print(*found.shape, *found[:, 112, 0], *found[:, 112, 223], after - before < 200_000)"
    words = [sys.executable, "-c", script, str(_save(tmp_path / "long.png", pixels))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    middle = pixels[0, 10_000]
    assert done.stdout.split() == [str(v) for v in (3, 224, 224, *middle, *middle, True)]


class _Counting:
    def __init__(self) -> None:
        self.done = self.total = 0

    def begin(self, task: str, total: int, done: int = 0) -> None:
        self.total = total

    def advance(self, units: int, note: str = "") -> None:
        self.done += units

    def end(self) -> None: ...

    def say(self, text: str) -> None: ...


def _loader(data: Dataset, **options: Any) -> TensorLoader:
    usual = {"batch_size": 4, "seed": Seed(1), "augmentation": Augmentation(crop=1, flip=True), "device": "cpu"}
    return TensorLoader(data, **(usual | options))


def _same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name).cpu(), getattr(b, name).cpu()) for name in ("x", "y", "ids"))


@pytest.mark.parametrize("start", [0, 2, 4])
def test_batches_read_ahead_are_those_of_memory(root: Path, monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    held = folder.load("train", root, size=6)
    monkeypatch.setattr(folder, "HELD", 0)
    stored = folder.load("train", root, size=6)
    for options in ({}, {"extra": held, "extra_fraction": 0.5}):
        found = list(_loader(stored, **options).epoch(3, start))
        assert len(found) == 4 - start
        assert all(map(_same, found, _loader(held, **options).epoch(3, start)))


@pytest.mark.usefixtures("in_files")
def test_no_more_is_read_than_asked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    as_before = Pictures.__getitem__
    monkeypatch.setattr(Pictures, "__getitem__", lambda self, i: (read.append(len(i)), as_before(self, i))[1])
    batches = _loader(folder.load("train", root, size=6), batch_size=2).epoch(0)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert 1 <= len(read) <= 1 + READ_AHEAD
    list(_loader(folder.load("train", root, size=6)).epoch(0))
    assert read[-4:] == [4, 4, 4, 3]


@pytest.mark.usefixtures("in_files")
def test_a_damaged_file_ends_the_epoch_at_its_batch(root: Path) -> None:
    (root / "train" / "bee" / "2.png").write_bytes(b"no image")
    seen = []
    with pytest.raises(DataError, match=r"bee/2\.png cannot be decoded"):
        for batch in _loader(folder.load("train", root, size=6)).epoch(0):
            seen.append(batch.ids)
    order = Seed(1).child("order", 0).permutation(15)
    before = order.tolist().index(7) // 4
    assert len(seen) == before > 0
    assert torch.equal(torch.cat(seen), order[: 4 * before])


def test_work_in_the_background_keeps_its_order_and_its_distance() -> None:
    begun: list[int] = []

    def job(i: int) -> Any:
        def work() -> int:
            begun.append(i)
            return i * i

        return work

    results = in_background((job(i) for i in range(9)), ahead=2)
    assert begun == []
    assert [next(results), next(results)] == [0, 1]
    assert len(begun) <= 4
    assert list(results) == [4, 9, 16, 25, 36, 49, 64]
    assert begun == list(range(9))
    assert list(in_background([], ahead=2)) == []


def test_an_error_in_the_background_reaches_the_caller_in_its_turn() -> None:
    def fail() -> int:
        raise DataError("third")

    results = in_background([lambda: 1, lambda: 2, fail, lambda: 4], ahead=3)
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(DataError, match="third"):
        next(results)


def test_imagenet_is_known_by_its_number_of_classes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("imagenet", root) is None
    with pytest.raises(DataError, match=r"train/ with 1000 class folders not found in .*--data-dir FOLDER"):
        imagenet.load("train", root)
    monkeypatch.setattr(imagenet, "CLASSES", 3)
    data = imagenet.load("test", root)
    assert (data.name, data.input_shape, data.num_classes, len(data)) == ("imagenet", (3, 224, 224), 3, 15)
    assert torch.equal(
        data.pixels(torch.arange(15)), folder.load("test", root, size=224, resize=256).pixels(torch.arange(15))
    )
    inner = root / "data" / "imagenet"
    inner.mkdir(parents=True)
    for split in ("train", "val"):
        (root / split).rename(inner / split)
    assert found("imagenet", root / "data") == f"{inner} (train and val)"


@pytest.mark.gpu
@pytest.mark.usefixtures("in_files")
def test_files_reach_a_gpu_without_a_wait(root: Path) -> None:
    stored = folder.load("train", root, size=6)
    here = list(_loader(stored).epoch(0))
    list(_loader(stored, device="cuda").epoch(0))  # what is set up once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = list(_loader(stored, device="cuda").epoch(0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(batch.x.is_cuda and batch.y.is_cuda and batch.ids.is_cuda for batch in there)
    assert all(map(_same, here, there))


def test_lengths_are_checked_of_files_too(root: Path) -> None:
    pictures = Pictures(root / "train", ["ant/0.png", "ant/1.png"], Form(size=6))
    with pytest.raises(DataError, match="2 inputs, 3 labels"):
        check(Dataset("toy", pictures, torch.zeros(3).long(), 1))
