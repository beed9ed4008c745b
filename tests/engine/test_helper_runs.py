"""Runs of HAT that stop: they end like those that do not, with their own helper and no other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatrock.core.errors import StateError
from flatrock.core.tensorfile import load, weights_digest
from flatrock.engine.folder import RunFolder
from flatrock.engine.job import Job
from flatrock.engine.loop import train

MakeJob = Callable[..., Job]
AWP, SWA = {"name": "awp", "gamma": 0.01}, {"name": "swa", "decay": 0.8, "bn": "recompute", "batches": 2}


def test_a_stopped_run_ends_like_one_that_was_not(
    hat: Callable[..., Job], snapshot: Callable[[Path], dict[str, Any]], stopper: Callable[[int], Any], helper_run: Path
) -> None:
    keys: dict[str, Any] = {"flatness": [AWP, SWA], "train__save_seconds": 1e-9}
    whole = train(hat("whole", **keys))
    for step in (2, 7):
        with pytest.raises(KeyboardInterrupt):
            train(hat("stopped", **keys), resume=step > 2, progress=stopper(step))
    moved = helper_run.parent / "moved"
    shutil.copytree(helper_run, moved, dirs_exist_ok=True)
    run = train(hat("stopped", helper=moved, **keys), resume=True)  # the same helper, elsewhere
    assert run.status == "finished"
    assert run.records[-1].terms.keys() >= {"ce", "kl", "ce_helper"}
    a, b = (snapshot(r.folder) for r in (whole, run))
    assert a["records"] == b["records"]
    for file in ("best.safetensors", "last.safetensors", "state.safetensors"):
        assert a[file][0] == b[file][0]


def test_another_helper_is_refused(
    hat: Callable[..., Job], make_job: MakeJob, tmp_path: Path, stopper: Callable[[int], Any]
) -> None:
    other = tmp_path / "other"
    train(make_job(other, objective={"name": "standard"}, attack={}, seed=2))
    with pytest.raises(KeyboardInterrupt):
        train(hat(train__save_seconds=1e-9), progress=stopper(3))
    first, second = hat(), hat(helper=other)
    assert first.recipe_hash == second.recipe_hash
    assert first.helper is not None and second.helper is not None
    state = (first.folder / "state.safetensors").read_bytes()
    with pytest.raises(StateError, match="name the helper the run began with, or --overwrite") as caught:
        train(second, resume=True)
    for digest in (first.helper.digest, second.helper.digest):
        assert digest[:16] in str(caught.value)
    assert (first.folder / "state.safetensors").read_bytes() == state
    assert train(hat(), resume=True).status == "finished"


def test_the_run_knows_its_helper(hat: Callable[..., Job], helper_run: Path) -> None:
    run = train(hat(train__epochs=1))
    about = RunFolder(run.folder).read_info()["provenance"]["helper"]
    assert (about["checkpoint"], about["objective"], about["run"]) == ("best.safetensors", "standard", helper_run.name)
    job = hat("again")
    assert job.helper is not None
    assert about["weights"] == job.helper.digest == weights_digest(job.helper.network)
    assert load(run.folder / "state.safetensors")[1]["helper"] == job.helper.digest
