"""What a run refuses to do, and what it therefore leaves alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flatrock.core.errors import ConfigError, StateError
from flatrock.core.tensorfile import load, save
from flatrock.engine.checkpoint import model_tensors, put_model
from flatrock.engine.folder import RunFolder, changed_paths
from flatrock.engine.job import Job
from flatrock.engine.loop import train
from flatrock.recipes.restore import load as load_model
from flatrock.recipes.restore import open_checkpoint
from flatrock.workflows.evaluate import evaluate_run

MakeJob = Callable[..., Job]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(small_run, tmp_path / "run"))


def test_existing_run_is_not_touched(make_job: MakeJob, run: Path) -> None:
    before = contents(run)
    with pytest.raises(StateError, match=r"run folder .*run exists; .*--resume.*--overwrite.*--run-dir") as caught:
        train(make_job(run))
    for keyword in ("resume=True", "overwrite=True", "folder="):
        assert keyword in str(caught.value)
    assert contents(run) == before


@pytest.mark.parametrize("flag", ["overwrite", "resume"])
def test_a_folder_that_is_no_run_is_not_touched(make_job: MakeJob, tmp_path: Path, flag: str) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("three years of work")
    (folder / "best.safetensors").write_bytes(b"mine")
    with pytest.raises(StateError, match=r"not a flatrock run; it is left alone|cannot be resumed"):
        train(make_job(folder), **{flag: True})
    assert contents(folder) == {"best.safetensors": b"mine", "chapter.txt": b"three years of work"}


@pytest.mark.parametrize("name", ["best.safetensors", "epoch-0001.safetensors", "recipe.yaml", "metrics.jsonl"])
def test_a_familiar_name_does_not_make_a_run(make_job: MakeJob, tmp_path: Path, name: str) -> None:
    """Other programs write files of these names too; only run.json says that the folder is ours to clear."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / name).write_bytes(b"mine")
    with pytest.raises(StateError, match="not a flatrock run; it is left alone"):
        train(make_job(folder), overwrite=True)
    assert contents(folder) == {name: b"mine"}


def test_a_file_is_no_folder(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("here")
    for flags in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(StateError, match="is a file; choose another run folder"):
            train(make_job(tmp_path / "run"), **flags)
    assert (tmp_path / "run").read_text() == "here"


def test_a_folder_that_cannot_be_made(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StateError, match=r"cannot create run folder .*--run-dir \(in Python: folder="):
        train(make_job(tmp_path / "taken" / "run"))


def test_overwrite_replaces_the_run(make_job: MakeJob, run: Path) -> None:
    told = [run / name for name in ("result-best.json", "curves.png", "overfit.json", "overfit.png", "overfit.svg")]
    for file in told:
        file.write_text("{}")
    again = train(make_job(run, train__epochs=1), overwrite=True)
    assert [r.epoch for r in again.records] == [1]
    assert not (run / "epoch-0002.safetensors").exists()
    assert [file.name for file in told if file.exists()] == [], "a result of weights that are gone"


@pytest.mark.parametrize("name", ["notes.txt", "photo.png", "mine.safetensors", "results-of-mine.json", "sub/run.json"])
def test_overwrite_spares_files_that_are_not_the_runs(make_job: MakeJob, run: Path, name: str) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(b"precious")
    train(make_job(run, train__epochs=1), overwrite=True)
    assert (run / name).is_file(), f"{name} was deleted"
    assert (run / name).read_bytes() == b"precious"


def test_what_is_no_run_is_called_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: digits_at\n")
    with pytest.raises(StateError, match=r"mine\.yaml is a recipe, not a run; train it first: flatrock train "):
        load_model(tmp_path / "mine.yaml")
    with pytest.raises(ConfigError, match=r"a run is named by its folder or a checkpoint file, got 3"):
        load_model(3)  # type: ignore[arg-type]


def test_weights_of_other_projects_are_told_from_damage(tmp_path: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pt")
    torch.save(state, tmp_path / "c.pth", _use_new_zipfile_serialization=False)
    np.savez(tmp_path / "d.npz", image=np.zeros(3))
    for file in sorted(tmp_path.iterdir()):
        with pytest.raises(StateError, match=r"not a flatrock checkpoint.*--weights.*load_foreign") as caught:
            load_model(file)
        assert "damaged" not in str(caught.value)
    assert "is a torch file or another archive, not" in str(caught.value)


def test_resume_and_overwrite_exclude_each_other(make_job: MakeJob, run: Path) -> None:
    before = contents(run)
    with pytest.raises(StateError, match="--resume and --overwrite exclude each other"):
        train(make_job(run), resume=True, overwrite=True)
    assert contents(run) == before


def test_resume_with_another_recipe_names_the_keys(make_job: MakeJob, run: Path) -> None:
    before = contents(run)
    with pytest.raises(StateError, match="belongs to another recipe") as caught:
        train(make_job(run, seed=9, optimizer__lr=0.2, attack__steps=3), resume=True)
    text = str(caught.value)
    for line in ("seed: 4 there, 9 asked for", "optimizer.lr: 0.4 there, 0.2 asked for", "attack.steps: 1 there, 3"):
        assert line in text
    assert "momentum" not in text
    assert text.endswith(
        f"(`flatrock train {run} --resume`), repeat the overrides it began with, or choose another --run-dir"
    )
    assert contents(run) == before


def test_differences_lists_paths() -> None:
    a = {"x": 1, "same": [1, 2], "deep": {"k": {"v": 1.0}}, "only_a": 3}
    b = {"x": 2, "same": (1, 2), "deep": {"k": {"v": 1.5}}}
    assert changed_paths(a, b) == [
        "deep.k.v: 1.5 there, 1.0 asked for",
        "only_a: None there, 3 asked for",
        "x: 2 there, 1 asked for",
    ]


def test_failed_run_offers_no_model(run: Path) -> None:
    RunFolder(run).write_info(status="failed", reason="the loss became non-finite at step 3")
    for use in (load_model, open_checkpoint, evaluate_run):
        with pytest.raises(StateError, match=r"FAILED \(the loss became non-finite at step 3\); name a checkpoint"):
            use(run)  # type: ignore[operator]
    assert not list(run.glob("result*"))
    assert not load_model(run / "last.safetensors").training, "a named file is looked at anyway"


@pytest.mark.parametrize("status", ["fahled", "", None])
def test_a_status_nobody_writes_is_damage(run: Path, status: str | None) -> None:
    """One flipped bit of run.json must not turn a failed run into a good one."""
    RunFolder(run).write_info(status=status)
    with pytest.raises(StateError, match=r"run\.json"):
        load_model(run)


def test_unknown_which(run: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="unknown checkpoint 'bets'; known: auto, average-best, average-last, best, last; did you mean 'best'",
    ):
        load_model(run, which="bets")
    with pytest.raises(ConfigError, match=r"is named by its file, .*run.epoch-0003\.safetensors"):
        load_model(run, which="epoch-3")


@pytest.mark.parametrize("source", ["nowhere", "run/nothing.safetensors"])
def test_nothing_there(run: Path, tmp_path: Path, source: str) -> None:
    with pytest.raises(StateError, match="there is no run folder or checkpoint"):
        load_model(tmp_path / source)


def test_folder_without_run(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"is not a run folder: it has no run\.json"):
        load_model(tmp_path)


def test_run_without_finished_epoch(make_job: MakeJob, tmp_path: Path, stopper: Callable[[int], Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(make_job(tmp_path / "run"), progress=stopper(1))
    for which in ("best", "last"):
        with pytest.raises(StateError, match="has no finished epoch yet; train on with --resume"):
            load_model(tmp_path / "run", which=which)


def test_lost_best_is_not_called_collapse(run: Path) -> None:
    """The records name a best epoch, so a missing file is a loss and no collapse."""
    (run / "best.safetensors").unlink()
    with pytest.raises(StateError, match="best") as caught:
        load_model(run)
    assert "single class" not in str(caught.value)


def test_lost_last_is_not_called_unfinished(run: Path) -> None:
    (run / "last.safetensors").unlink()
    with pytest.raises(StateError, match="last") as caught:
        load_model(run, which="last")
    assert "no finished epoch" not in str(caught.value)


def test_run_without_best_epoch(run: Path, make_job: MakeJob, tmp_path: Path) -> None:
    """Every probed epoch collapsed, but the run was cut short, so it is no failure."""
    job = make_job(tmp_path / "flat", train__max_steps=2)
    train(replace(job, probe=lambda model: replace(job.probe(model), collapsed=True)))
    with pytest.raises(StateError, match=r"has no best epoch: every one predicted a single class; .*--which last"):
        load_model(tmp_path / "flat")
    assert load_model(tmp_path / "flat", which="last") is not None


def test_averages_without_best_epoch_leave_the_weights_themselves(run: Path) -> None:
    """SWA averaged what could not be averaged; the network it started from is still there, and named."""
    RunFolder(run).write_info(averages=True)
    with pytest.raises(
        StateError, match=r"the averaged weights of .* have no best epoch: .* --which average-last or best"
    ):
        load_model(run)
    assert load_model(run, which="best") is not None


def test_checkpoint_must_fit_the_model(make_job: MakeJob, run: Path, tmp_path: Path) -> None:
    tensors, _ = load(run / "best.safetensors")
    model = nn.Sequential(nn.Linear(3, 2))
    before = model[0].weight.clone()
    with pytest.raises(StateError, match=r"best\.safetensors does not fit this model: \d+ tensors differ, first \['0"):
        put_model(model, tensors, run / "best.safetensors")
    assert torch.equal(model[0].weight, before)


def test_one_wrong_shape_is_named(make_job: MakeJob, run: Path, tmp_path: Path) -> None:
    tensors, meta = load(run / "best.safetensors")
    tensors["model/head.bias"] = torch.zeros(11)
    save(tmp_path / "odd.safetensors", tensors, meta)
    with pytest.raises(StateError, match=r"does not fit this model: 1 tensors differ, first \['head\.bias'\]"):
        load_model(tmp_path / "odd.safetensors")


def test_state_of_another_network_does_not_resume(make_job: MakeJob, run: Path) -> None:
    """Same recipe hash, other tensors: a state someone put together by hand."""
    folder = RunFolder(run)
    tensors, meta = load(folder.state)
    tensors.pop("model/bn1.weight")
    save(folder.state, tensors, meta)
    with pytest.raises(StateError, match=r"does not fit this model: 1 tensors differ, first \['bn1\.weight'\]"):
        train(make_job(run), resume=True)


def test_model_tensors_round_trip(make_job: MakeJob, tmp_path: Path) -> None:
    a, b = make_job(tmp_path, seed=1).model, make_job(tmp_path, seed=2).model
    save(tmp_path / "a.safetensors", model_tensors(a), {"note": "é"})
    tensors, meta = load(tmp_path / "a.safetensors")
    put_model(b, tensors, tmp_path / "a.safetensors")
    assert meta == {"note": "é"}
    assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())
