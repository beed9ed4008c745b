"""The four commands for models that are not flatrock's, on data with options: own images and own functions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_cases import flatrock, refusal, stored
from PIL import Image

NETS = """
from torch import nn, manual_seed

def grey():
    manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Softplus(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 2))

def flat():
    manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 4), nn.Softplus(), nn.Linear(4, 2))
"""
DATA = """
import torch
from torch import Tensor

def make(split: str, n: int) -> tuple[Tensor, Tensor]:
    return torch.rand(n, 2), torch.arange(n) % 2
"""
THREAT = ("--norm", "linf", "--eps", "0.1")
LITTLE = ("--images", "4", "--attack", "pgd-2")
CURVED = ("--probes", "2", "--no-layers", "--runs", "2", "--steps", "4", "--top", "2", "--awp-steps", "1")
FEW: dict[str, tuple[str, ...]] = {
    "eval": (*THREAT, "--attacks", "fgsm"),
    "certify": ("--sigma", "0.25", "--n0", "4", "--n", "50", "--limit", "4"),
    "curvature": (*THREAT, *LITTLE, *CURVED),
    "landscape": (*THREAT, *LITTLE, "--points", "3", "--directions", "2"),
}
every = pytest.mark.parametrize("command", list(FEW))


@pytest.fixture(autouse=True)
def files(here: Path) -> Iterator[None]:
    """Networks, a function that makes data, and grey images of two classes, no two of one size."""
    (here / "somenets.py").write_text(NETS)
    (here / "somedata.py").write_text(DATA)
    for split in ("train", "test"):
        for name, level in (("cat", 30), ("dog", 220)):
            (here / "photos" / split / name).mkdir(parents=True)
            for i in range(4):
                Image.new("L", (10 + i, 12 + 2 * i), level + i).save(here / "photos" / split / name / f"{i}.png")
    yield
    for module in ("somenets", "somedata"):
        sys.modules.pop(module, None)


def ask(command: str, data: str, *words: str, net: str = "grey") -> tuple[str, ...]:
    few = (*FEW[command], "--device", "cpu")
    return (command, "--model", f"somenets:{net}", "--data", data, "--data-dir", "photos", *few, *words)


@every
def test_own_images_of_many_sizes(command: str) -> None:
    told = refusal(flatrock(*ask(command, "folder")))
    assert "give data.size to have squares of one size cut out (without a recipe: --data folder:size=64)" in told
    told = refusal(flatrock(*ask(command, "folder:size=8")))
    assert "does not take inputs [2, 3, 8, 8] of 'folder'" in told
    assert "give the size and channels that it takes, such as --data folder:size=28:channels=1" in told
    files = [stored(flatrock(*ask(command, data))) for data in ("folder:size=8:channels=1", "folder:channels=1:size=9")]
    seen = [json.loads(file.read_text())["provenance"] for file in files]
    assert [about["dataset"] for about in seen] == ["folder:channels=1:size=8", "folder:channels=1:size=9"]
    for size, file in enumerate(files, 8):
        assert f"-folder_channels=1_size={size}-" in file.name
    before = files[0].read_bytes()
    assert flatrock(*ask(command, "folder:channels=1:size=8", "--resume")).exit_code == 0
    assert files[0].read_bytes() == before, "read, not made again"


@every
def test_own_functions(command: str) -> None:
    file = stored(flatrock(*ask(command, "somedata:make:n=12", net="flat")))
    assert "-somedata_make_n=12-" in file.name
    about = json.loads(file.read_text())["provenance"]
    assert about["dataset"] == "somedata:make:n=12"
    assert about["data"].endswith("of 12 samples")


@every
def test_faults_come_at_once_and_before_anything_is_read(command: str, here: Path) -> None:
    told = refusal(flatrock(*ask(command, "folder:siz=8:channels=2", "--num-classes", "1")))
    for part in ("num_classes: ", "data: unknown option of dataset 'folder': 'siz'", "data: channels must be 1"):
        assert part in told
    assert "needs options (n); give them beside data.name (without a recipe: --data somedata:make:n=...)" in refusal(
        flatrock(*ask(command, "somedata:make", net="flat"))
    )
    assert not list(here.glob("*.json"))


def test_a_certificate_of_other_options_is_not_taken_for_this_one(here: Path) -> None:
    words = ask("certify", "folder:channels=1:size=8", "--out", "mine.json")
    assert flatrock(*words).exit_code == 0
    before = (here / "mine.json").read_bytes()
    for other in ("folder:channels=1:size=9", "folder:channels=1:size=8:resize=8"):
        done = flatrock(*ask("certify", other, "--out", "mine.json", "--resume"))
        assert "mine.json is a record of something else (different: data)" in refusal(done)
    assert (here / "mine.json").read_bytes() == before


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            "curvature",
            "curvatures of different samples are not compared: folder train, 4 of 8 samples, but with digests",
        ),
        ("landscape", "landscapes of different samples (digest) are not drawn at one scale"),
    ],
)
def test_records_of_other_options_share_no_table(command: str, told: str) -> None:
    files = [stored(flatrock(*ask(command, f"folder:channels=1:size={size}"))) for size in (8, 9)]
    assert told in refusal(flatrock(command, *files))
    assert flatrock(command, files[0], files[0]).exit_code == 0
