"""Weight files: what is taken out of them, and what is refused without running any of it."""

from __future__ import annotations

import argparse
import hashlib
import re
import shlex
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from start_cases import same
from torch import Tensor, nn

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.tensorfile import save
from flatrock.models.weights import read_weights

PLAIN = {"a.weight": torch.full((2,), 1.0), "a.bias": torch.full((2,), 2.0)}
SMOOTH = {k: v + 10 for k, v in PLAIN.items()}
LAST = {k: v + 20 for k, v in PLAIN.items()}


def stored(folder: Path, content: Any, name: str = "w.pt") -> Path:
    torch.save(content, folder / name)
    return folder / name


def test_safetensors_and_torch_files_of_both_formats_give_the_same(tmp_path: Path) -> None:
    save_file(PLAIN, tmp_path / "w.safetensors")
    torch.save(PLAIN, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for path in (tmp_path / "w.safetensors", stored(tmp_path, PLAIN), tmp_path / "old.pt"):
        found = read_weights(path)
        assert same(found.state, PLAIN)
        assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert (found.entry, found.others, found.averaged) == ("", (), False)


@pytest.mark.parametrize(
    ("content", "entry", "others", "state"),
    [
        ({"state_dict": PLAIN, "epoch": 3, "acc": 0.5}, "state_dict", (), PLAIN),
        ({"net": PLAIN, "optimizer": {"state": {0: SMOOTH}, "param_groups": []}}, "net", (), PLAIN),
        ({"model": {"state_dict": PLAIN}}, "model.state_dict", (), PLAIN),
        ({"model": PLAIN, "ema": SMOOTH}, "ema", ("model",), SMOOTH),
        ({"state_dict": PLAIN, "model_ema": {"state_dict": SMOOTH}}, "model_ema.state_dict", ("state_dict",), SMOOTH),
        ({"best": PLAIN, "last": LAST}, "last", ("best",), LAST),
        ({"best_state_dict": SMOOTH, "net": PLAIN, "epoch": {"now": 3}}, "net", ("best_state_dict",), PLAIN),
        ({**PLAIN, "epoch": 3}, "", (), PLAIN),
        ({"rmodel": PLAIN, "optimizer": {"state": {}, "param_groups": []}}, "rmodel", (), PLAIN),
    ],
)
def test_checkpoints_are_unwrapped(
    tmp_path: Path, content: dict[str, Any], entry: str, others: tuple[str, ...], state: dict[str, Tensor]
) -> None:
    found = read_weights(stored(tmp_path, content))
    assert (found.entry, found.others) == (entry, others)
    assert same(found.state, state)
    assert found.averaged == ("ema" in entry)


def test_the_entry_can_be_chosen(tmp_path: Path) -> None:
    path = stored(tmp_path, {"model": {"state_dict": PLAIN}, "ema": SMOOTH, "student": LAST, "epoch": 3})
    assert same(read_weights(path, which="model").state, PLAIN)
    assert same(read_weights(path, which="student").state, LAST)
    with pytest.raises(ConfigError, match=r"'modle'; known: ema, model, student; did you mean 'model'"):
        read_weights(path, which="modle")


def test_the_part_under_a_prefix_can_be_chosen(tmp_path: Path) -> None:
    joint = {f"{name}.{k}": v for name, part in (("student", PLAIN), ("teacher", LAST)) for k, v in part.items()}
    save_file(joint, tmp_path / "w.safetensors")
    for path, entry in (
        (tmp_path / "w.safetensors", "student"),
        (stored(tmp_path, {"state_dict": joint, "epoch": 3}), "state_dict.student"),
    ):
        found = read_weights(path, which="student")
        assert same(found.state, PLAIN)
        assert found.entry == entry
    assert same(read_weights(path, which="teacher").state, LAST)
    assert same(read_weights(path, which="student.a").state, {"weight": PLAIN["a.weight"], "bias": PLAIN["a.bias"]})
    with pytest.raises(ConfigError, match=r"'pupil'; known: state_dict"):
        read_weights(path, which="pupil")
    with pytest.raises(ConfigError, match=r"'techer'; known: student, teacher; did you mean 'teacher'"):
        read_weights(tmp_path / "w.safetensors", which="techer")
    averaged = read_weights(stored(tmp_path, {f"ema.{k}": v for k, v in PLAIN.items()}), which="ema")
    assert averaged.averaged


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    for zipped in (True, False):
        path = tmp_path / "w.pt"
        content = {"state_dict": PLAIN, "trap": Trap(tmp_path / "sprung")}
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(StateError, match=r"would run code from the file, so it is refused"):
            read_weights(path)
        assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("content", "what", "entry"),
    [
        ({"state_dict": PLAIN, "acc": np.float64(0.5)}, r"numpy\.\w+\.multiarray\.scalar", "state_dict"),
        ({"net": OrderedDict(PLAIN), "args": argparse.Namespace(ema=True)}, r"argparse\.Namespace", "net"),
        ({**PLAIN, "args": argparse.Namespace(net=1)}, r"argparse\.Namespace", ""),
        (nn.Linear(2, 2), r"torch\.nn\.modules\.linear\.Linear", ""),
        ({"model": nn.Linear(2, 2)}, r"torch\.nn\.modules\.linear\.Linear", "model"),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_files_that_need_pickle_are_refused_with_the_reason_and_the_way_out(
    tmp_path: Path, content: Any, what: str, entry: str, zipped: bool
) -> None:
    path = tmp_path / "it's.pt"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(StateError, match=rf"holds a {what}, and reading it would run code") as error:
        read_weights(path)
    text = str(error.value)
    assert "if you trust" in text
    _, minus_c, command = shlex.split(text[text.index("python -c ") :])
    assert minus_c == "-c" and f'torch.load("{path}", map_location="cpu", weights_only=False)' in command
    exec(command.replace("plain.pt", str(tmp_path / "plain.pt")), {})
    found = read_weights(tmp_path / "plain.pt")
    assert (found.entry, len(found.state)) == (entry, 2), "what is said works"


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"<!DOCTYPE html><html>Google Drive</html>", "it is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "pointer of Git LFS"),
        (b"", "damaged or of another kind"),
        (b"\x00\x01" * 500, "damaged or of another kind"),
    ],
)
def test_what_is_no_weights_file_says_what_it_is(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StateError, match=text):
        read_weights(tmp_path / name)


def test_half_a_download_is_noticed(tmp_path: Path) -> None:
    path = stored(tmp_path, {"w": torch.rand(1000)})
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(StateError, match="no whole torch file"):
        read_weights(path)


def test_torchscript_is_refused_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)).save(str(tmp_path / "s.pt"))
    recwarn.clear()
    with pytest.raises(StateError, match=r"s\.pt is a TorchScript archive, .*\(\): return torch\.jit\.load\(") as error:
        read_weights(tmp_path / "s.pt")
    assert not recwarn.list
    assert "download" not in str(error.value)
    script = re.search(r"`(def make.*?)`", str(error.value))
    assert script is not None
    made: dict[str, Any] = {"torch": torch}
    exec(script[1], made)
    assert isinstance(made["make"](), nn.Module), "what is said works"


@pytest.mark.parametrize("name", ["w.npz", "w.pt"])
def test_arrays_of_numpy_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        np.savez(file, **{k: v.numpy() for k, v in PLAIN.items()})
    with pytest.raises(StateError, match="holds arrays of numpy") as error:
        read_weights(tmp_path / name)
    *_, minus_c, command = shlex.split(str(error.value))
    assert minus_c == "-c"
    exec(command.replace("plain.pt", str(tmp_path / "plain.pt")), {})
    assert read_weights(tmp_path / "plain.pt").state.keys() == PLAIN.keys()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}, "state of an optimizer"),
        ({"epoch": 3, "loss": 0.1}, "no weights .its entries: epoch; loss"),
        (
            {"student": PLAIN, "epoch": 3},
            "other entries look like some: say --which student .for a recipe",
        ),
        ({"a": PLAIN, "b": LAST}, "no weights under a name that is known.*: say --which a or --which b .for"),
        ({"model": {"a": PLAIN}}, r"no weights \(its entries: a\)"),
        ([PLAIN], "holds a list, not a state dict"),
        (torch.ones(3), "holds a Tensor, not a state dict"),
    ],
)
def test_files_without_a_model(tmp_path: Path, content: Any, text: str) -> None:
    with pytest.raises(StateError, match=text):
        read_weights(stored(tmp_path, content))


def test_an_unknown_entry_of_a_file_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'c'; known: a, b"):
        read_weights(stored(tmp_path, {"a": PLAIN, "b": LAST}), which="c")
    with pytest.raises(ConfigError, match=r"'c'; known: none"):
        read_weights(stored(tmp_path, {"epoch": 3}), which="c")


def test_checkpoints_of_runs_go_the_other_way(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    save(path, {"model/head.weight": torch.ones(2, 2)}, {"role": "best"})
    with pytest.raises(StateError, match=f"without --weights, as in `flatrock eval {path}`"):
        read_weights(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="there is no weights file"):
        read_weights(tmp_path / "nothing.pt")
