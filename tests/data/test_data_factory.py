"""Data that a function of the user's makes, `module:function`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatrock.core.errors import ConfigError, DataError
from flatrock.data.catalog import check_data, found, how_to_get, info, load_data

HEAD = """
from pathlib import Path
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

Y = torch.arange(12) % 3
X = torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(0))

class Listed(Dataset):
    classes = ["a", "b", "c"]
    def __init__(self, items):
        self.items = items
    def __len__(self):
        return len(self.items)
    def __getitem__(self, i):
        return self.items[i]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_data", None)


def write(body: str) -> None:
    Path("own_data.py").write_text(f"{HEAD}\n{body}\n")


def returning(value: str, kind: str = "Dataset") -> None:
    write(f"def make(split: str) -> {kind}:\n    return {value}")


def load(split: Any = "train", **options: Any) -> Any:
    return load_data("own_data:make", split, folder=Path("files"), **options)


def expected() -> torch.Tensor:
    return torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("(X, Y)", "tuple[Tensor, Tensor]"),
        ("(X.double(), Y.int())", "tuple"),
        ("(X.numpy(), Y.numpy())", "'tuple[np.ndarray, np.ndarray]'"),
        ("TensorDataset(X, Y)", "Dataset"),
        ("TensorDataset(X, Y)", "TensorDataset"),
        ("Listed([(x, int(y)) for x, y in zip(X, Y)])", "Listed"),
        ("Listed([(x.numpy(), y.numpy()) for x, y in zip(X, Y)])", "Dataset"),
        ("Listed([(x.requires_grad_(), np.int16(y)) for x, y in zip(X.clone(), Y)])", "Dataset"),
    ],
)
def test_pairs_and_datasets_give_the_same(value: str, kind: str) -> None:
    returning(value, kind)
    for split in ("train", "test"):
        data = load(split)
        assert torch.equal(data.images(torch.arange(12)), expected())
        assert data.y.tolist() == [0, 1, 2] * 4
        assert (data.name, data.num_classes) == ("own_data:make", 3)
        assert data.class_names == (("a", "b", "c") if "Listed" in value else ())


BYTES = "(X * 255).byte()"


@pytest.mark.parametrize(
    "value",
    [
        f"({BYTES}, Y)",
        f"({BYTES}.permute(0, 2, 3, 1).numpy(), Y)",
        f"TensorDataset({BYTES}, Y)",
        f"Listed([(x.permute(1, 2, 0).numpy(), int(y)) for x, y in zip({BYTES}, Y)])",
        f"Listed([(Image.fromarray(x.permute(1, 2, 0).numpy()), int(y)) for x, y in zip({BYTES}, Y)])",
    ],
)
def test_bytes_are_images_channels_last_unless_they_are_tensors(value: str) -> None:
    returning(value, "tuple" if value.startswith("(") else "Dataset")
    data = load()
    assert data.x.dtype == torch.uint8
    assert torch.equal(data.x, (expected() * 255).byte())


def test_grey_images_get_a_channel() -> None:
    returning("Listed([(Image.fromarray(x[0].numpy()), int(y)) for x, y in zip((X * 255).byte(), Y)])")
    assert load().input_shape == (1, 4, 4)


def test_a_class_can_be_named_and_the_test_split_keeps_the_classes_of_train() -> None:
    write(
        "class make(Dataset):\n"
        "    def __init__(self, split): self.n = 12 if split == 'train' else 2\n"
        "    def __len__(self): return self.n\n"
        "    def __getitem__(self, i): return X[i], int(Y[i])"
    )
    assert (len(load("test")), load("test").num_classes) == (2, 3)


def test_options_and_the_folder_reach_the_function_if_it_takes_them() -> None:
    write(
        "def make(split: str, folder: Path, scale: float, shift: float = 0.0) -> tuple[Tensor, Tensor]:\n"
        "    assert folder == Path('files')\n"
        "    return X * scale + shift, Y"
    )
    assert torch.equal(load(scale=0.5, shift=0.25).x, expected() * 0.5 + 0.25)
    with pytest.raises(ConfigError, match=r"unknown option of data 'own_data:make': 'shif'; known: scale, shift; did"):
        load(scale=0.5, shif=1)
    with pytest.raises(ConfigError) as raised:
        check_data("own_data:make", {"shif": 1, "name": "other"})
    assert [fault.partition(";")[0] for fault in raised.value.faults] == [
        "unknown option of data 'own_data:make': 'shif'",
        "unknown option of data 'own_data:make': 'name'",
        "data 'own_data:make' needs options (scale)",
    ]
    with pytest.raises(ConfigError, match=r"beside data\.name \(without a recipe: --data own_data:make:scale=\.\.\.\)"):
        load()


def test_what_it_draws_is_the_same_every_time_and_torchs_state_is_given_back() -> None:
    write("def make(split: str) -> tuple[Tensor, Tensor]:\n    return torch.rand(12, 2), Y")
    state = torch.get_rng_state()
    first, again, test = load(), load(), load("test")
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, test.x)
    assert torch.equal(state, torch.get_rng_state())


def test_the_file_is_read_as_it_is_now() -> None:
    returning("(X, Y)", "tuple")
    assert torch.equal(load().x, expected())
    returning("(X / 2, Y)", "tuple")
    assert torch.equal(load().x, expected() / 2)


# What a name may lead to


@pytest.mark.parametrize(
    "body",
    [
        "def make(split):\n    raise SystemError('called')",
        "def make(split: str) -> str:\n    raise SystemError('called')",
        "def make(where: str) -> tuple:\n    raise SystemError('called')",
        "make = np.load",
        "from shutil import rmtree as make",
        "make = 3",
        "class make:\n    def __init__(self, split):\n        raise SystemError('called')",
        "def make(split: str) -> 'Nothing':\n    raise SystemError('called')",
    ],
)
def test_only_what_is_written_there_and_says_that_it_makes_data_is_called(body: str) -> None:
    write(body)
    with pytest.raises(ConfigError, match=r"not written in own_data\.py as a function that takes `split` and says"):
        load()


def test_names_that_lead_nowhere(here: Path) -> None:
    returning("(X, Y)", "tuple")
    with pytest.raises(ConfigError, match="unknown function that makes data 'mak'; known: make; did you mean 'make'"):
        check_data("own_data:mak", {})
    for name in ("own_data.sub:make", ":make", "own_data:", "a:b:c"):
        with pytest.raises(ConfigError, match="does not name data; write file:function"):
            info(name)
    for name in ("sklearn:make", "nowhere:make", "numpy:load"):
        with pytest.raises(ConfigError, match="is not a module of the current folder"):
            load_data(name, "train")
    (here / "below").mkdir()
    (here / "below" / "__init__.py").write_text("raise SystemError('run')")
    with pytest.raises(ConfigError, match="is not a module of the current folder"):
        load_data("below:make", "train")


def test_facts_are_known_without_running_the_file(here: Path) -> None:
    write("raise SystemError('run')")
    assert info("own_data:make").num_classes is None
    assert found("own_data:make") == str(here / "own_data.py")
    assert found("elsewhere:make") is None
    assert "own_data.py in the current folder" in how_to_get("own_data:make")
    with pytest.raises(ConfigError, match="importing 'own_data' raised SystemError: run"):
        load()


# What it may return

WRONG = {
    "it is a DataLoader, whose .*; return its .dataset": "DataLoader(TensorDataset(X, Y))",
    "it is a dict, whose samples cannot": "{'x': X, 'y': Y}",
    "it is a Tensor, whose samples cannot": "X",
    "it is a NoneType, whose samples cannot": "None",
    "it has no samples": "Listed([])",
    "sample 0 is a dict, not a pair; return a pair": "Listed([{'image': x, 'label': 0} for x in X])",
    "sample 0 has a label of type str": "Listed([(x, 'cat') for x in X])",
    "sample 0 has a label of type float": "Listed([(x, 1.0) for x in X])",
    "sample 0 has a label of type Tensor": "Listed([(x, torch.ones(3)) for x in X])",
    "sample 0 has a label of type bool": "Listed([(x, True) for x in X])",
    "sample 0 has an input of type str": "Listed([('cat.png', 0)])",
    "sample 0 is an image of mode P": "Listed([(Image.new('P', (4, 4)), 0)])",
    r"sample 1 is torch.float32 \[3, 4, 3\], but sample 0 is .* \[3, 4, 4\]": "Listed([(X[0], 0), (X[1][..., 1:], 1)])",
    "sample 1 is torch.uint8": "Listed([(X[0], 0), (X[1].byte(), 1)])",
    "sample 0 raised ZeroDivisionError": "type('L', (Listed,), {'__getitem__': lambda self, i: 1 // 0})([1])",
    r"inputs must lie in \[0, 1\], got": "(X * 2 - 1, Y)",
    "inputs hold NaN": "(X * torch.nan, Y)",
    "12 inputs, but 11 labels": "(X, Y[1:])",
    "no sample has label 0": "(X, Y + 1)",
    "inputs must be bytes": "(X.long(), Y)",
    "a uint8 tensor must hold images": "(X.byte()[:, 0], Y)",
    "labels must be whole numbers": "(X, Y.float())",
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_cannot_be_used_is_named(fault: str) -> None:
    returning(WRONG[fault], "tuple" if WRONG[fault].startswith("(") else "Dataset")
    with pytest.raises(DataError, match=rf"data 'own_data:make' cannot be used:(.|\n)*make\('train'\): .*{fault}"):
        load()


def test_what_it_raises_is_told() -> None:
    returning("1 // 0")
    with pytest.raises(ConfigError, match=r"own_data:make\('train'\) raised ZeroDivisionError"):
        load()


def test_splits_must_agree() -> None:
    returning("(X, Y) if split == 'train' else (X[:, :1], Y + 1)", "tuple")
    with pytest.raises(DataError) as raised:
        load()
    assert "make('train') has inputs [3, 4, 4], own_data:make('test') has [1, 4, 4]" in str(raised.value)
    assert "make('test'): label 3 of sample 2 (4 such), but own_data:make('train') has classes 0..2" in str(
        raised.value
    )
