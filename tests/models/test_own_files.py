"""A network of one's own is the one its file describes now, however often the file changes within one process."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.models.catalog import create_model
from flatrock.models.classifier import Classifier
from flatrock.models.factory import find_factory
from flatrock.recipes.restore import load
from flatrock.workflows.train import train_recipe

SOURCE = """
from torch import nn

WIDTH = {width}
runs = []

class Net(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(64, WIDTH), nn.Linear(WIDTH, num_classes)

    def forward(self, x):
        assert self.inner.out_features == WIDTH
        return self.last(self.inner(x.flatten(1)))
"""


def write(folder: Path, width: int) -> None:
    """All versions are as long and may be of the same second: neither size nor time tells them apart."""
    folder.mkdir(exist_ok=True)
    (folder / "edited_net.py").write_text(SOURCE.format(width=width))


def make() -> Classifier:
    return create_model("edited_net:Net", input_shape=[1, 8, 8])


def width(model: Classifier) -> int:
    return model.head.in_features


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 16)
    yield tmp_path
    for name in ("edited_net", "edited_part"):
        sys.modules.pop(name, None)


def test_an_edited_file_is_run_again_and_an_unchanged_one_is_not(folder: Path) -> None:
    old = make()
    assert width(old) == 16
    assert type(old.network) is type(make().network)
    write(folder, 40)
    new = make()
    assert width(new) == 40
    x = torch.rand(2, 1, 8, 8)
    assert old(x).shape == new(x).shape, "a network made before the edit runs the code it was made with"
    write(folder, 16)
    assert width(make()) == 16


def test_training_and_loading_use_the_file_as_it_is(folder: Path) -> None:
    changes = {"model.name": "edited_net:Net", "train.max_steps": 1, "data.limit": 200}
    for size in (16, 40):
        write(folder, size)
        run = train_recipe("digits_standard", folder=folder / "run", overwrite=True, **changes)
        assert width(load(run, which="last")) == size


def test_another_folder_has_its_own_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "other", 24)
    assert width(make()) == 16
    monkeypatch.chdir(folder / "other")
    assert width(make()) == 24
    monkeypatch.chdir(folder)
    assert width(make()) == 16


def test_one_the_user_imported_himself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    mine = importlib.import_module("edited_net")
    write(folder, 40)
    assert width(make()) == 40
    assert sys.modules["edited_net"] is mine
    write(folder, 24)
    importlib.reload(mine)
    assert width(make()) == 24
    write(folder / "other", 24)
    importlib.reload(mine)
    monkeypatch.chdir(folder / "other")
    with pytest.raises(ConfigError, match=r"'edited_net' is already imported from .*, not from .*other/edited_net.py"):
        make()


@pytest.mark.parametrize("name", ["json", "builtins"])
def test_a_name_that_is_taken(folder: Path, name: str) -> None:
    taken = sys.modules[name]
    (folder / f"{name}.py").write_text(SOURCE.format(width=8))
    with pytest.raises(ConfigError, match=f"'{name}' is already imported from .*; call the file something else"):
        create_model(f"{name}:Net", input_shape=[1, 8, 8])
    assert sys.modules[name] is taken


def test_an_error_in_the_file_is_told_until_it_is_mended(folder: Path) -> None:
    make()
    good = sys.modules["edited_net"]
    for _ in range(2):
        (folder / "edited_net.py").write_text("1 / 0")
        with pytest.raises(ConfigError, match="importing 'edited_net' raised ZeroDivisionError"):
            make()
    assert sys.modules["edited_net"] is good
    write(folder, 40)
    assert width(make()) == 40


def test_networks_can_be_copied_and_pickled(folder: Path) -> None:
    make()
    write(folder, 40)
    network = make().network
    assert isinstance(network, nn.Module)
    assert type(copy.deepcopy(network)) is type(network)
    assert type(pickle.loads(pickle.dumps(network))) is type(network)


def test_files_it_imports_and_one_that_trains_when_it_is_imported(folder: Path) -> None:
    """They are imported as always: once, and what is there already is taken."""
    (folder / "edited_part.py").write_text("WIDTH = 5\n")
    own = SOURCE.replace("WIDTH = {width}", "from edited_part import WIDTH")
    again = "\nfrom flatrock.models.factory import find_factory\nruns.append(find_factory('edited_net:Net') is Net)\n"
    (folder / "edited_net.py").write_text(own + again)
    assert width(make()) == 5
    assert find_factory("edited_net:Net").__module__ == "edited_net"
    assert sys.modules["edited_net"].runs == [True]
