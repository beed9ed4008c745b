"""Faults of values, and of the user's own code, in words that tell what to write."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import flatrock
from flatrock.core.errors import ConfigError, ModelError
from flatrock.recipes.load import load_recipe

NETS = """
from torch import nn


class Net(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, k), nn.ReLU(), nn.Linear(k, 10))

    def forward(self, x):
        return self.body(x)


def broken(num_classes: int) -> nn.Module:
    return nn.Linear(3, "a")


class Trains(Net):
    def __init__(self):
        super().__init__(8)

    def forward(self, x):
        if self.training:
            raise IndexError("nobody")
        return super().forward(x)
"""
DATA = """
import torch


def make(split: str) -> tuple:
    x = torch.rand(4, 1, 8, 8)
    return x[7], 3


class Listed(torch.utils.data.Dataset):
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return [][i]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worded_nets.py").write_text(NETS)
    (tmp_path / "worded_data.py").write_text(DATA)
    yield tmp_path
    for name in ("worded_nets", "worded_data", "worded_late"):
        sys.modules.pop(name, None)


def fault(**overrides: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load_recipe("digits_at", overrides)
    (told,) = raised.value.faults
    return told


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("train.epochs", 0, "must be at least 1"),
        ("train.epochs", 1.5, "must be a whole number"),
        ("train.epochs", "many", "must be a whole number"),
        ("train.epochs", True, "must be a whole number"),
        ("train.save_seconds", 0, "must be above 0"),
        ("train.tensorboard", "perhaps", "must be true or false"),
        ("data.augment.erase", 2, "must be at most 1"),
        ("optimizer.momentum", 1, "must be below 1"),
        ("threat.norm", "l3", "must be 'linf' or 'l2'"),
        ("model.weights", "", "must not be empty"),
        ("model.normalize", 3, "must be text"),
    ],
)
def test_values_and_their_rules(key: str, value: object, rule: str) -> None:
    assert fault(**{key: value}) == f"{key}: got {value!r}, but it {rule}"


def test_what_a_notebook_defines_belongs_into_a_file() -> None:
    def make() -> nn.Module:
        raise AssertionError("called")

    make.__module__ = "__main__"
    for section in ("model", "data"):
        told = fault(**{section: {"name": make}})
        assert told.startswith(f"{section}.name: got a function, but it is named by text; write it to a .py file")
        assert "`%%writefile mine.py`" in told
        told = fault(**{section: {"name": "__main__:make"}})
        assert told.startswith(f"{section}: '__main__' is the notebook or script that runs now")
        assert told.endswith("and name it 'mine:make'")
    make.__module__ = "mynets"
    told = "model.name: got a function, but it is named by text; write 'mynets:make', found if mynets.py lies in the "
    assert fault(model={"name": make}).startswith(told)


def test_the_advice_about_arguments_is_followed_by_success(here: Path) -> None:
    told = fault(**{"model.name": "worded_nets:Net"})
    assert "needs arguments (k); give it, such as model.k=8, or write a function without" in told
    assert load_recipe("digits_at", {"model.name": "worded_nets:Net", "model.k": 8}).model.options["k"] == 8
    advice = "def net() -> nn.Module: return Net"
    assert f"`{advice}(depth=18)`" in told
    (here / "worded_late.py").write_text(f"{NETS}\n{advice}(8)\n")
    assert load_recipe("digits_at", {"model.name": "worded_late:net"}).model.name == "worded_late:net"


def test_errors_of_the_users_code_come_with_file_and_line(here: Path) -> None:
    told = fault(**{"model.name": "worded_nets:broken"})
    assert "raised TypeError" in told
    assert told.endswith("(worded_nets.py:15)")
    keys = {"model": {"name": "worded_nets:Trains"}}
    with pytest.raises(ModelError, match=r"IndexError: nobody \(worded_nets\.py:24\)$"):
        flatrock.train("digits_at", folder=here / "run", **keys)
    shape = {"model": {"name": "worded_nets:Net", "k": 4, "input_shape": [1, 8, 8], "num_classes": 10}}
    for name, line in (("make", 7), ("Listed", 18)):
        with pytest.raises(flatrock.FlatrockError, match=rf"IndexError: .* \(worded_data\.py:{line}\)"):
            flatrock.train(
                "digits_at", folder=here / "run", data={"name": f"worded_data:{name}", "held_out": 1}, **shape
            )
    (here / "worded_late.py").write_text("import torch\n\nx = 1 // 0\n")
    assert fault(**{"model.name": "worded_late:net"}).endswith("by zero (worded_late.py:3)")
    assert not (here / "run").exists()
