"""Datasets, loaders, tensors and networks given where something else is meant: what is told, and that cures work."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import flatrock
from flatrock.core.errors import ConfigError, ThreatError, is_plain, shown
from flatrock.data.catalog import load_data

X = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 10
SET = TensorDataset(X, Y)
THREAT = flatrock.Linf(0.1)
MODEL = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("loader", DataLoader(SET, batch_size=6)),
        ("loader", DataLoader(SET, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(0))),
        ("dataset", SET),
        ("dataset", Subset(SET, range(20))),
        ("dataset", [(x, int(y)) for x, y in zip(X, Y, strict=True)]),
        ("data", load_data("digits", "test")),
    ],
)
@pytest.mark.parametrize("rest", [(), (THREAT,), (Y, THREAT)])
def test_the_cure_for_what_is_no_tensor_works(name: str, given: Any, rest: tuple[Any, ...]) -> None:
    with pytest.raises(ThreatError, match=rf"^inputs must be a torch tensor, got {type(given).__name__}; ") as raised:
        flatrock.evaluate(MODEL, given, *rest)
    words = str(raised.value).partition("; write ")[2].removesuffix(" first, and give both")
    scope: dict[str, Any] = {"torch": torch, name: given}
    exec(words, scope)  # of a message of ours
    result = flatrock.evaluate(MODEL, scope["x"], scope["y"], THREAT, attacks=["fgsm"])
    assert result.n == len(given if name != "loader" else SET)
    if name != "data":
        assert (scope["x"].sort(0).values == X.sort(0).values).all()
        assert scope["y"].bincount().tolist() == [2] * 10


def test_a_pair_in_the_place_of_inputs() -> None:
    with pytest.raises(ThreatError, match="got tuple; give inputs and labels as two arguments"):
        flatrock.evaluate(MODEL, (X, Y), THREAT)  # type: ignore[call-arg, arg-type]
    for x, y in ((X.numpy(), Y), (X, Y.numpy()), (X, Y.tolist())):
        with pytest.raises(ThreatError, match=r"must be a torch tensor, got .*; use torch.as_tensor"):
            flatrock.evaluate(MODEL, x, y, THREAT)
    with pytest.raises(ThreatError, match=r"threat must be .*, got a Tensor of shape \[20\]$"):
        flatrock.evaluate(MODEL, X, Y, Y)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((X, Y), "a list of 2 (a Tensor of shape [20, 1, 8, 8], a Tensor of shape [20])"),
        (SET, "a TensorDataset"),
        (DataLoader(SET), "a DataLoader"),
        (X, "a Tensor of shape [20, 1, 8, 8]"),
        (X.numpy(), "a ndarray of shape [20, 1, 8, 8]"),
    ],
)
def test_training_data_that_are_given_are_not_printed_and_the_way_is_told(given: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        flatrock.train("digits_at", data=given)
    (fault,) = raised.value.faults
    assert fault.startswith(f"data: got {told}, but a section holds keys; recipes name their data: np.savez arrays")
    assert "data={'name': 'npz'}, data_dir=FOLDER" in fault
    assert "0." not in fault, "no number of theirs"


def test_a_network_that_is_given_is_not_printed() -> None:
    with pytest.raises(ConfigError, match=r"model: got a Sequential, but .* model={'name': 'mynets:make'}"):
        flatrock.train("digits_at", model=MODEL)
    with pytest.raises(ConfigError, match=r"data.name: got a TensorDataset, but it must be text"):
        flatrock.train("digits_at", data__name=SET)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("8/255", "'8/255'"),
        ([1, [2.5, None]], "[1, [2.5, None]]"),
        ({"a": True}, "{'a': True}"),
        (np.float32(0.5), repr(np.float32(0.5))),
        (datetime.date(2020, 1, 2), "datetime.date(2020, 1, 2)"),
        (torch.ones(()), "a Tensor of shape []"),
        ([X] * 9, "a list of 9 (" + "a Tensor of shape [20, 1, 8, 8], " * 3 + "...)"),
        (object(), "a object"),
        (MODEL, "a Sequential"),
    ],
)
def test_values_in_messages(value: object, told: str) -> None:
    assert shown(value) == told


def test_plain_values_are_those_of_files() -> None:
    assert is_plain({"a": [1, "b", None, 2.5, True, np.int64(3)]})
    assert not is_plain([X])
    assert not is_plain({"a": X})
