from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flatrock.core.errors import ConfigError, DataError
from flatrock.core.progress import Silent
from flatrock.data import folder


def _image(path: Path, *, value: int = 0, size: tuple[int, int] = (5, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0], 3), value, dtype=np.uint8)
    pixels[0, 1] = (10, 20, 30)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        for label, name in enumerate(("ant", "bee", "cat")):
            for i in (2, 1):
                _image(tmp_path / split / name / f"{i}.png", value=40 * label + i)
    return tmp_path


def test_classes_and_files_come_in_alphabetical_order(root: Path) -> None:
    data = folder.load("train", root)
    assert data.class_names == ("ant", "bee", "cat")
    assert data.y.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.x.shape == (6, 3, 4, 5)
    assert data.x[:, 0, 3, 4].tolist() == [1, 2, 41, 42, 81, 82]
    assert data.x[0, :, 0, 1].tolist() == [10, 20, 30]
    assert folder.SOURCE.find(root) == f"{root} (train and test)"


def test_one_channel_on_request(root: Path) -> None:
    data = folder.load("test", root, channels=1)
    assert data.x.shape == (6, 1, 4, 5)
    assert data.x[:, 0, 3, 4].tolist() == [1, 2, 41, 42, 81, 82]
    with pytest.raises(ConfigError, match=r"channels must be 1 .* or 3 .*, got 4"):
        folder.load("test", root, channels=4)


def test_other_formats_and_modes_load_and_stray_files_do_not(root: Path) -> None:
    Image.new("L", (5, 4), 7).save(root / "train" / "ant" / "3.bmp")
    Image.new("RGBA", (5, 4), (1, 2, 3, 255)).save(root / "train" / "ant" / "4.PNG")
    Image.new("RGB", (5, 4), (9, 9, 9)).save(root / "train" / "ant" / "5.jpeg")
    (root / "train" / "ant" / "notes.txt").write_text("not an image")
    (root / "train" / "ant" / ".hidden.png").write_text("not an image")
    (root / "train" / ".cache").mkdir()
    data = folder.load("train", root)
    assert data.y.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2]
    assert data.x[2, :, 0, 0].tolist() == [7, 7, 7]
    assert data.x[3, :, 0, 0].tolist() == [1, 2, 3]


def test_images_below_folders_of_a_class_are_its_own(root: Path) -> None:
    """As Tiny ImageNet lies: train/<class>/images/*."""
    _image(root / "train" / "bee" / "more" / "deep" / "0.png", value=99)
    _image(root / "train" / "bee" / ".thumbs" / "0.png", value=98)
    _image(root / "train" / "dog" / "images" / "1.png", value=97)
    data = folder.load("train", root)
    assert data.y.tolist() == [0, 0, 1, 1, 1, 2, 2, 3]
    assert data.x[:, 0, 3, 4].tolist() == [1, 2, 41, 42, 99, 81, 82, 97]
    assert folder.damaged("train", root, Silent()) == []


def test_numbering_comes_from_train_even_if_test_lacks_a_class(root: Path) -> None:
    for path in (root / "test" / "ant").iterdir():
        path.unlink()
    (root / "test" / "ant").rmdir()
    data = folder.load("test", root)
    assert data.y.tolist() == [1, 1, 2, 2]
    assert data.num_classes == 3


def test_test_folder_alone_is_enough_to_evaluate(root: Path) -> None:
    (root / "train").rename(root / "elsewhere")
    assert folder.load("test", root).class_names == ("ant", "bee", "cat")
    assert folder.SOURCE.find(root) == f"{root} (test)"
    with pytest.raises(DataError, match=rf"folder train/ not found in {root}; .*train/<class>"):
        folder.load("train", root)


def test_unknown_class_in_test_is_named(root: Path) -> None:
    _image(root / "test" / "dog" / "1.png")
    with pytest.raises(DataError, match=r"test/dog is no class of .*train \(ant, bee, cat\)"):
        folder.load("test", root)


def test_first_image_of_another_size_is_named(root: Path) -> None:
    _image(root / "train" / "bee" / "15.png", size=(5, 6))
    with pytest.raises(DataError, match=r"bee/15\.png is 5x6, but .*ant/1\.png is 5x4; give data\.size"):
        folder.load("train", root)


@pytest.mark.parametrize("damage", ["truncate", "header", "empty", "flip"])
def test_damaged_image_is_named(damage: str, root: Path) -> None:
    path = root / "train" / "cat" / "1.png"
    raw = bytearray(path.read_bytes())
    if damage == "truncate":
        raw = raw[:50]
    elif damage == "header":
        raw[:8] = bytes(8)
    elif damage == "empty":
        raw = bytearray()
    else:
        raw[50] ^= 0xFF
    path.write_bytes(bytes(raw))
    with pytest.raises(DataError, match=r"cat/1\.png cannot be decoded .*replace or remove"):
        folder.load("train", root)


def test_sixteen_bit_image_is_refused_not_clipped(root: Path) -> None:
    Image.fromarray(np.full((4, 5), 4000, dtype=np.uint16)).save(root / "train" / "cat" / "1.png")
    with pytest.raises(DataError, match=r"cat/1\.png has mode I;16, which is not read; save it as RGB or grey, 8 bits"):
        folder.load("train", root)


def test_empty_class_and_missing_classes_are_named(root: Path, tmp_path: Path) -> None:
    (root / "train" / "dog").mkdir()
    with pytest.raises(DataError, match=r"train/dog holds no images \(looked for \.png, "):
        folder.load("train", root)
    (tmp_path / "bare" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no class folders"):
        folder.load("train", tmp_path / "bare")
    assert folder.SOURCE.find(tmp_path / "nowhere") is None
