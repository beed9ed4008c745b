"""The commit a number is said to come from."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from flatrock.core import provenance
from flatrock.core.borrow import full_precision

HEAD = "0123456789abcdef0123456789abcdef01234567"


def commit(monkeypatch: pytest.MonkeyPatch, *, changes: str = "", loaded: float = math.inf, told: str = "") -> str:
    """What `commit` says in a clean checkout, with these uncommitted changes, of a process that began then."""
    said = {
        "rev-parse --show-toplevel": "/tree",
        "rev-parse HEAD": HEAD,
        "status": changes,
        "ls-files": "provenance.py",
    }

    def git(where: Path, *words: str) -> str:
        return said[" ".join(words) if words[0] == "rev-parse" else words[0]]

    monkeypatch.setattr(provenance, "_git", git)
    monkeypatch.setattr(provenance, "LOADED", loaded)
    monkeypatch.setenv("FLATROCK_COMMIT", told)
    return provenance.commit.__wrapped__()


def test_the_commit_is_that_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit(monkeypatch) == "0123456789ab"


def test_changes_that_are_not_in_it_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit(monkeypatch, changes=" M src/flatrock/core/rng.py") == "0123456789ab+"


def test_a_process_that_runs_older_files_than_there_are_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = max(file.stat().st_mtime for file in Path(provenance.__file__).parents[1].rglob("*.py"))
    assert commit(monkeypatch, loaded=newest) == "0123456789ab"
    assert commit(monkeypatch, loaded=newest - 1) == "0123456789ab+"


def test_notes_of_editors_are_no_files_of_flatrock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "flatrock" / "core"
    package.mkdir(parents=True)
    (package / "rng.py").touch()
    (package / ".#rng.py").symlink_to("nobody@nowhere.1:2")
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    assert commit(monkeypatch) == "0123456789ab"
    (package / "gone.py").symlink_to("nowhere.py")
    assert commit(monkeypatch) == "0123456789ab+"


def test_a_copy_believes_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit(monkeypatch, changes="?", told="abc") == "abc"


def test_an_installed_copy_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(where: Path, *words: str) -> str:
        raise subprocess.CalledProcessError(128, ["git", *words])

    monkeypatch.delenv("FLATROCK_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "_git", fails)
    assert provenance.commit.__wrapped__() == "not a checkout"


def test_a_certificate_of_the_cpu_says_nothing_of_gpus() -> None:
    born = provenance.birth_certificate(device="cpu", seed=0)
    assert born["numpy"] == np.__version__
    assert list(born) == ["flatrock", "commit", "torch", "numpy", "python", "device", "seed", "time"]


@pytest.mark.parametrize("allowed", [{"matmul": True, "cudnn": False}, {"matmul": False, "cudnn": True}])
def test_a_certificate_of_a_gpu_tells_its_libraries_and_tf32(
    monkeypatch: pytest.MonkeyPatch, allowed: dict[str, bool]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    kinds = {"matmul": torch.backends.cuda.matmul, "cudnn": torch.backends.cudnn.conv}
    before = {name: kind.fp32_precision for name, kind in kinds.items()}
    try:
        for name, kind in kinds.items():
            kind.fp32_precision = "tf32" if allowed[name] else "ieee"
        born = provenance.birth_certificate(device="cuda:0", seed=0)
    finally:
        for name, kind in kinds.items():
            kind.fp32_precision = before[name]
    assert (born["device"], born["cuda"], born["cudnn"], born["tf32"]) == ("a GPU", "13.0", 91900, allowed)
    assert json.loads(json.dumps(born)) == born


@pytest.mark.gpu
def test_a_certificate_of_this_gpu() -> None:
    born = provenance.birth_certificate(device="cuda", seed=0)
    assert born["cuda"] == torch.version.cuda
    assert isinstance(born["cudnn"], int)
    assert set(born["tf32"]) == {"matmul", "cudnn"}
    with full_precision("cuda"):
        assert not any(provenance.birth_certificate(device="cuda", seed=0)["tf32"].values())
