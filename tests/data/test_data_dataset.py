from __future__ import annotations

import dataclasses

import pytest
import torch

from flatrock.core.errors import DataError
from flatrock.data.dataset import Dataset, check


def _pixels(n: int = 6) -> Dataset:
    x = torch.arange(n * 2 * 3 * 3, dtype=torch.uint8).reshape(n, 2, 3, 3)
    return Dataset("toy", x, torch.arange(n) % 3, 3, ("a", "b", "c"))


def test_ids_default_to_positions_and_survive_subsets_of_subsets() -> None:
    whole = _pixels()
    assert whole.ids.tolist() == [0, 1, 2, 3, 4, 5]
    part = whole.subset(torch.tensor([5, 2, 0])).subset(torch.tensor([1, 0]))
    assert part.ids.tolist() == [2, 5]
    assert part.y.tolist() == [2, 2]
    assert torch.equal(part.x, whole.x[[2, 5]])
    assert (part.name, part.num_classes, part.class_names) == ("toy", 3, ("a", "b", "c"))
    assert len(part) == 2
    assert part.input_shape == (2, 3, 3)


def test_every_byte_becomes_its_value_over_255() -> None:
    x = torch.arange(256, dtype=torch.uint8).reshape(256, 1, 1, 1)
    images = Dataset("bytes", x, torch.zeros(256, dtype=torch.int64), 1).images(torch.arange(256))
    exact = torch.tensor([v / 255 for v in range(256)], dtype=torch.float32)
    assert torch.equal(images.flatten(), exact)


def test_float_inputs_are_returned_as_they_are() -> None:
    x = torch.rand(4, 2, generator=torch.Generator().manual_seed(0))
    images = Dataset("floats", x, torch.zeros(4, dtype=torch.int64), 1).images(torch.tensor([3, 1]))
    assert torch.equal(images, x[[3, 1]])


def test_to_moves_all_tensors() -> None:
    moved = _pixels().to("meta")
    assert {moved.x.device.type, moved.y.device.type, moved.ids.device.type} == {"meta"}


def test_dataset_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        _pixels().name = "other"  # type: ignore[misc]


def test_fingerprint_follows_content_and_nothing_else() -> None:
    base = _pixels()
    assert base.fingerprint() == dataclasses.replace(base, name="renamed").fingerprint()
    assert base.fingerprint() == dataclasses.replace(base, x=base.x.clone()).fingerprint()
    other_pixel, other_label = base.x.clone(), base.y.clone()
    other_pixel[0, 0, 0, 0] += 1
    other_label[0] = 1
    changed = [
        dataclasses.replace(base, x=other_pixel),
        dataclasses.replace(base, y=other_label),
        dataclasses.replace(base, num_classes=4),
        dataclasses.replace(base, x=base.x.reshape(6, 1, 6, 3)),
        base.subset(torch.arange(5)),
    ]
    prints = {d.fingerprint() for d in [base, *changed]}
    assert len(prints) == 6
    assert len(base.fingerprint()) == 64


def test_fingerprint_of_a_strided_view_is_that_of_its_content() -> None:
    base = _pixels()
    view = dataclasses.replace(base, x=base.x.permute(0, 1, 3, 2))
    assert view.fingerprint() == dataclasses.replace(base, x=view.x.contiguous()).fingerprint()


def test_check_passes_good_data_through() -> None:
    good = _pixels()
    assert check(good) is good


BAD = {
    "must lie in .*NaN": {"x": torch.tensor([[0.5], [float("nan")]])},
    "must lie in .* got \\[0, 1.5\\]": {"x": torch.tensor([[0.0], [1.5]])},
    "must lie in .* got \\[-0.1": {"x": torch.tensor([[-0.1], [1.0]])},
    "must lie in .*inf": {"x": torch.tensor([[0.0], [float("inf")]])},
    "uint8 or float32, got torch.float64": {"x": torch.zeros(2, 1, dtype=torch.float64)},
    "uint8 inputs must be images": {"x": torch.zeros(2, 1, dtype=torch.uint8)},
    "3 inputs, 2 labels": {"x": torch.zeros(3, 1)},
    "1 ids": {"ids": torch.tensor([7])},
    "is empty": {"x": torch.zeros(0, 1), "y": torch.zeros(0, dtype=torch.int64)},
    "label 2 of sample 1 is outside 0..1": {"y": torch.tensor([0, 2])},
    "label -1 of sample 0 is outside 0..1": {"y": torch.tensor([-1, 0])},
    "labels must be int64": {"y": torch.zeros(2)},
    r"y and ids \[N\]": {"y": torch.zeros(2, 2, dtype=torch.int64)},
    "3 class names for 2 classes": {"class_names": ("a", "b", "c")},
}


@pytest.mark.parametrize("message", BAD)
def test_check_names_what_is_wrong(message: str) -> None:
    good = Dataset("toy", torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]), 2)
    fields = {"name": "toy", "x": good.x, "y": good.y, "num_classes": 2} | BAD[message]
    with pytest.raises(DataError, match=message):
        check(Dataset(**fields))


def test_minus_one_is_a_label_only_where_permitted() -> None:
    extra = Dataset("extra", torch.zeros(2, 1), torch.tensor([-1, 1]), 2)
    assert check(extra, unlabelled=True) is extra
    with pytest.raises(DataError, match=r"outside -1\.\.1"):
        check(Dataset("extra", torch.zeros(2, 1), torch.tensor([-2, 1]), 2), unlabelled=True)
