"""Models that flatrock did not train, on data with options: refused at once, told in records, one file for each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatrock.core.errors import ConfigError, StateError
from flatrock.data.catalog import load_data
from flatrock.workflows.foreign import evaluate_foreign, foreign_place, store_foreign
from flatrock.workflows.foreign_model import ForeignModel

NETS = """
from torch import nn, manual_seed

def make():
    manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
"""
DATA = """
import torch
from torch import Tensor

def make(split: str, n: int, flip: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.arange(2 * n).view(n, 2) / (2 * n)
    y = torch.arange(n) % 2
    return x, 1 - y if flip else y
"""
ASKED: dict[str, Any] = {"norm": "l2", "eps": 0.1, "attacks": ["fgsm"]}


@pytest.fixture(autouse=True)
def files(here: Path) -> Iterator[None]:
    (here / "flatnets.py").write_text(NETS)
    (here / "flatdata.py").write_text(DATA)
    yield
    for name in ("flatnets", "flatdata"):
        sys.modules.pop(name, None)


def asked(data: Any, **options: Any) -> Any:
    return evaluate_foreign("flatnets:make", data=data, **ASKED, **options)


def test_text_and_mapping_say_the_same_and_reach_the_data() -> None:
    found = [asked("moons:points=40:noise=1/20"), asked({"name": "moons", "noise": 0.05, "points": 40})]
    assert [result.n for result in found] == [40, 40]
    assert {result.provenance["dataset"] for result in found} == {"moons:noise=0.05:points=40"}
    assert len({result.provenance["samples_digest"] for result in found}) == 1
    assert foreign_place(found[0]) == foreign_place(found[1])
    assert foreign_place(found[0]).name.startswith("result-flatnets_make-moons_noise=0.05_points=40-l2-0.1-fgsm-n40-")
    part = ForeignModel(data="moons:points=6").part("train", None)
    assert torch.equal(part.x, load_data("moons", "train", points=6).x)  # type: ignore[arg-type]


def test_without_options_all_is_called_as_ever() -> None:
    result = asked("moons", limit=10)
    assert result.provenance["dataset"] == "moons"
    assert foreign_place(result).name.startswith("result-flatnets_make-moons-l2-0.1-fgsm-n10-")


def test_other_options_are_another_question_though_the_samples_are_the_same(here: Path) -> None:
    out = here / "mine.json"
    plain, spoken = (asked(data, journal=True) for data in ("flatdata:make:n=12", "flatdata:make:n=12:flip=false"))
    assert plain.provenance["samples_digest"] == spoken.provenance["samples_digest"]
    assert foreign_place(plain) != foreign_place(spoken)
    store_foreign(plain, out)
    assert asked("flatdata:make:n=12", out=out, resume=True).n == 12
    for data in ("flatdata:make:n=12:flip=false", "flatdata:make:n=12:flip=true", "flatdata:make:n=14"):
        with pytest.raises(StateError, match=r"is the result of another evaluation \(different: data\)"):
            asked(data, out=out, resume=True)


def test_all_faults_of_the_data_come_with_those_of_the_other_options() -> None:
    with pytest.raises(ConfigError) as raised:
        evaluate_foreign("flatnets:make", data="folder:siz=8:channels=2:size=0", norm="l2", eps="much")
    found = raised.value.faults
    assert [fault.partition(":")[0] for fault in found] == ["data", "data", "data", "eps"]
    assert "unknown option of dataset 'folder': 'siz'; known: channels, resize, size; did you mean 'size'?" in found[0]
    assert "channels must be 1 (grey) or 3 (RGB), got 2" in found[1]
    assert "size must be a whole number >= 1, got 0" in found[2]
    for data, fault in (
        (
            "flatdata:make",
            r"needs options \(n\); give them beside data\.name \(without a recipe: --data flatdata:make:n=",
        ),
        ("flatdata:make:n=4:m=5", "unknown option of data 'flatdata:make': 'm'; known: flip, n"),
        ("flatdata:make:4", r"does not name data|expected option=value after ':', got '4'"),
        ({"points": 4}, "a mapping with 'name', got {'points': 4}"),
    ):
        with pytest.raises(ConfigError, match=f"the evaluation cannot start:\n  - data: .*(?:{fault})"):
            asked(data)
