"""package.module:factory: found in the current folder, made once, and every way to get it wrong has its words."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from flatrock.core.errors import ConfigError
from flatrock.models.factory import find_factory, make_network

GOOD = """
import torch
from torch import nn

def net(width=3):
    import factory_good_helper
    return nn.Linear(factory_good_helper.INPUTS, width)

def needs(depth, width, *, bias):
    return nn.Linear(depth, width, bias=bias)

def nothing():
    return {"not": "a network"}

def fails():
    raise OSError("no such model")

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

made = Net()
number = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with modules of the user's, as the current one."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    files = {"good": GOOD, "good_helper": "INPUTS = 4\n", "hungry": "import nonexistent_zoo\n", "broken": "def net(:\n"}
    files["program"] = "import sys\nsys.exit(2)\n"
    for name, text in files.items():
        (tmp_path / f"factory_{name}.py").write_text(text)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("factory_"):
            del sys.modules[name]


def test_function_class_and_finished_network() -> None:
    for name, outputs in (("net", 3), ("Net", 2), ("made", 2)):
        made = make_network(f"factory_good:{name}")
        assert isinstance(made, nn.Linear)
        assert made.out_features == outputs
    assert make_network("factory_good:made") is find_factory("factory_good:made")()


def test_initial_weights_are_the_same_every_time_and_nothing_global_moves() -> None:
    state, path = torch.get_rng_state(), list(sys.path)
    one, two = make_network("factory_good:net"), make_network("factory_good:net")
    assert torch.equal(one.weight, two.weight)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert sys.path == path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("factory_nowhere:net", r"no module 'factory_nowhere' in /.* nor among the installed packages"),
        ("factory_good.inner:net", r"no module 'factory_good.inner'|'factory_good' is not a package"),
        ("factory_hungry:net", r"'factory_hungry' needs 'nonexistent_zoo', which is not installed"),
        ("factory_broken:net", r"importing 'factory_broken' raised SyntaxError"),
        ("factory_program:net", r"'factory_program' is a program that runs and ends when it is imported"),
        ("factory_good:nett", r"unknown factory 'nett'; known: .*net.*; did you mean 'net'"),
        ("factory_good:number", r"factory_good:number is of type int and cannot be called; write a function"),
        ("factory_good:needs", r"needs arguments \(depth, width, bias\); write a function without arguments"),
        ("factory_good:nothing", r"returned a dict, not a torch.nn.Module"),
        ("factory_good:fails", r"factory_good:fails\(\) raised OSError: no such model"),
        ("factory_good:", r"does not name a factory; write package.module:factory"),
        (":net", r"does not name a factory"),
        ("factory_good:net:more", r"does not name a factory"),
        ("../factory_good:net", r"does not name a factory"),
    ],
)
def test_what_is_missing_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_network(text)
