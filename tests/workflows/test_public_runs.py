"""`flatrock.open_run` and `flatrock.evaluate_run`: what the commands see and do, as calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flatrock
from flatrock.core.errors import ConfigError, StateError

SHORT: dict[str, Any] = {
    "train": {"epochs": 2, "batch_size": 64, "tensorboard": False},
    "data__limit": 512,
    "attack__steps": 2,
    "select": {"size": 40, "attack": "pgd-2"},
    "device": "cpu",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> flatrock.Run:
    return flatrock.train("digits_at", folder=tmp_path_factory.mktemp("runs") / "a", **SHORT)


def test_a_run_is_opened_as_it_was_returned_even_without_weights(run: flatrock.Run, tmp_path: Path) -> None:
    assert flatrock.open_run(run.folder) == run
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("run.json", "metrics.jsonl"):
        (bare / name).write_bytes((run.folder / name).read_bytes())
    assert flatrock.open_run(str(bare)).records == run.records
    with pytest.raises(StateError, match="not a run folder"):
        flatrock.open_run(tmp_path)


def test_a_run_is_evaluated_and_stored_as_by_the_command(run: flatrock.Run) -> None:
    result = flatrock.evaluate_run(run, attacks=["pgd-2"], limit=40, device="cpu")
    (file,) = run.folder.glob("result-*.json")
    stored = flatrock.Result.from_json(file.read_text())
    assert file.name == "result-best-pgd-2-n40-seed0.json"
    assert stored.flags.keys() == result.flags.keys() == {"clean", "pgd-2"}
    assert all(torch.equal(stored.flags[name], result.flags[name]) for name in result.flags)
    assert stored.provenance == result.provenance and "question" in result.provenance
    assert [f.code for f in result.findings] == [f.code for f in stored.findings]
    file.unlink()


def test_nothing_is_stored_if_that_is_asked(run: flatrock.Run) -> None:
    before = sorted(run.folder.iterdir())
    result = flatrock.evaluate_run(run.folder, attacks=["fgsm"], limit=40, store=False, doubt=False)
    assert result.n == 40 and result.findings == ()
    assert sorted(run.folder.iterdir()) == before
    with pytest.raises(ConfigError, match="unknown attack"):
        flatrock.evaluate_run(run, attacks=["pgdd"])
    assert sorted(run.folder.iterdir()) == before
