"""`flatrock export`: plain weights give the very logits of the run, in the architecture alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from command_cases import flatrock, refusal
from torch import Tensor, nn

import flatrock as library
from flatrock.core.tensorfile import load as load_checkpoint

TINY: dict[str, Any] = {"train__epochs": 2, "data__limit": 256, "train__batch_size": 64, "select__size": 40}
TINY |= {"train__tensorboard": False, "device": "cpu"}
OWN = """
from torch import nn

def make() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its network normalises, and keeps averaged weights. Read only."""
    folder = tmp_path_factory.mktemp("export") / "run"
    options = {"model": {"normalize": "centered"}, "flatness": [{"name": "swa", "decay": 0.5}], "train__max_steps": 6}
    return library.train("digits_standard", folder=folder, **options, **TINY).folder


def read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return safetensors.torch.load_file(file)
    weights: dict[str, Tensor] = torch.load(file, weights_only=True)
    return weights


@pytest.mark.parametrize("which", ["last", "average-last"])
@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "weights.safetensors"])
def test_logits_are_the_same_to_the_bit(run: Path, tmp_path: Path, name: str, which: str) -> None:
    done = flatrock("export", run, "--out", tmp_path / name, "--which", which)
    assert done.exit_code == 0, done.output
    model = library.create_model("digits_cnn", normalize="centered", seed=7)
    model.load_state_dict(read(tmp_path / name))  # strict: every name, and no other
    x = torch.rand(64, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), library.load(run, which=which)(x))
    assert f"wrote {tmp_path / name}: {len(model.state_dict())} tensors of {run / which}.safetensors" in done.output
    assert "inputs [n, 1, 8, 8] in [0, 1], normalised inside, (x - mean) / std, by the tensors `mean`" in done.output


def test_the_line_that_it_prints_loads_it(run: Path, tmp_path: Path) -> None:
    for name in ("a.pt", "a.safetensors"):
        done = flatrock("export", run, "--out", tmp_path / name, "--which", "last")
        (line,) = [line for line in done.output.splitlines() if line.startswith("load   ")]
        scope: dict[str, Any] = {"flatrock": library, "torch": torch, "safetensors": safetensors}
        exec(line.removeprefix("load   "), scope)
        x = torch.rand(4, 1, 8, 8)
        assert torch.equal(scope["model"](x), library.load(run, which="last")(x))


def test_names_are_those_of_checkpoints_without_the_prefix(run: Path, tmp_path: Path) -> None:
    flatrock("export", run / "last.safetensors", "--out", tmp_path / "a.pt")
    tensors, _ = load_checkpoint(run / "last.safetensors")
    weights = read(tmp_path / "a.pt")
    assert {f"model/{name}" for name in weights} == set(tensors)
    assert all(torch.equal(tensor, tensors[f"model/{name}"]) for name, tensor in weights.items())


@pytest.mark.parametrize("normalize", [None, "centered"])
def test_a_network_of_ones_own_has_its_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, normalize: str | None
) -> None:
    """Plain torch code, without flatrock: the module as its author knows it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"mine_{normalize}.py").write_text(OWN)
    network = {"name": f"mine_{normalize}:make", "normalize": normalize}
    keys = {**TINY, "train__max_steps": 4}
    run = library.train("digits_standard", folder="run", model=network, **keys).folder
    done = flatrock("export", run, "--out", "own.pt", "--which", "last")
    assert done.exit_code == 0, done.output
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    plain.load_state_dict(read(Path("own.pt")))
    x = torch.rand(16, 1, 8, 8)
    given = x if normalize is None else (x - 0.47) / 0.25
    assert torch.equal(plain(given), library.load(run, which="last")(x))
    told = (
        "not normalised" if normalize is None else "before your network: (x - mean) / std with mean [0.47], std [0.25]"
    )
    assert told in done.output and f"model = mine_{normalize}.make(...); " in done.output


def test_what_is_there_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_text("mine")
    assert "a.pt exists; choose another --out" in refusal(flatrock("export", run, "--out", tmp_path / "a.pt"))
    assert (tmp_path / "a.pt").read_text() == "mine"
    again = flatrock("export", run, "--which", "last", "--out", tmp_path / "a.pt", "--overwrite")
    assert again.exit_code == 0 and read(tmp_path / "a.pt")
    shutil.copy(run / "last.safetensors", tmp_path / "last.safetensors")
    words = ("export", run, "--out", tmp_path / "last.safetensors", "--overwrite")
    assert "is a checkpoint of a run, and is left alone" in refusal(flatrock(*words))


def test_refusals(run: Path, tmp_path: Path) -> None:
    assert "must end in .pt, .pth or .safetensors" in refusal(flatrock("export", run, "--out", tmp_path / "a.onnx"))
    assert "there is no run folder" in refusal(flatrock("export", tmp_path / "x", "--out", tmp_path / "a.pt"))
    assert not list(tmp_path.iterdir())
