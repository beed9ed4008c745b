"""The commit a number is said to come from."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest

from flatrock.core import provenance

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
