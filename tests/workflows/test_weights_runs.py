"""Recipes that begin with given weights: what is said before, what the hash knows, what resuming and loading need."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from start_cases import FEW, Told, at, same, weights
from torch import Tensor
from typer.testing import CliRunner

import flatrock
from flatrock.cli.main import app
from flatrock.core.errors import ConfigError, StateError
from flatrock.core.tensorfile import load, tensors_digest
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import recipe_hash
from flatrock.workflows.evaluate import evaluate_run
from flatrock.workflows.results import collect_run, other_sources
from flatrock.workflows.train import train_recipe


class Stop(Told):
    """Interrupts training after the first epoch."""

    def advance(self, units: int, note: str = "") -> None:
        if note.startswith("epoch 2"):
            raise KeyboardInterrupt


# What is said before


def check(*words: str) -> Any:
    return CliRunner().invoke(app, ["check", *words, "--device", "cpu"])


def test_check_tells_the_cost_and_then_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = check("digits_finetune")
    assert done.exit_code == 2
    assert "forward passes of the network per step" in done.output
    assert "is sound, but cannot be trained yet" in done.output
    assert "train it first: flatrock train digits_standard" in done.output
    both = check("digits_hat", "model.weights=gone.pt")
    assert "objective.helper: there is no" in both.output
    assert "model.weights: there is no" in both.output


def test_check_lists_it_with_all_other_faults(averaged: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({**averaged, "more.weight": torch.zeros(2)}, tmp_path / "odd.pt")
    for start, words in (("gone.pt", "there is no run folder"), ("odd.pt", "extra (1): more.weight")):
        done = check("digits_at", f"model.weights={tmp_path / start}", "train.epochs=0", "optimizer.lr=-1")
        assert done.exit_code == 2
        assert "has 3 faults" in done.output
        assert words in " ".join(done.output.split())
    done = check("digits_at", f"model.weights={tmp_path / 'gone.pt'}", "model.name=digits_cmm")
    assert "has 2 faults" in done.output, "no network, but the file is looked for"


def test_check_of_what_is_there(averaged_run: Path) -> None:
    assert check("digits_finetune", f"model.weights={averaged_run}").exit_code == 0


def test_copies_keep_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["cp", "digits_finetune", "my.yaml"]).exit_code == 0
    assert load_recipe(tmp_path / "my.yaml").model.weights == "runs/digits_standard"
    assert "digits_finetune" in CliRunner().invoke(app, ["ls", "recipes"]).output


# What the hash knows, what resuming and loading need


def test_the_hash_knows_that_there_are_weights_and_not_where() -> None:
    assert recipe_hash(at("here")) == recipe_hash(at("there"))
    assert recipe_hash(at("here")) != recipe_hash(at(None))
    assert "weights" not in at(None).training_keys()["model"]
    assert recipe_hash(load_recipe("digits_at")) == "dbff259671be295f"


def half(averaged_run: Path, folder: Path) -> None:
    """A run of two epochs that was stopped after one."""
    with pytest.raises(KeyboardInterrupt):
        train_recipe(at(averaged_run), folder=folder, device="cpu", progress=Stop())


def test_other_weights_are_not_resumed_with(averaged_run: Path, tmp_path: Path) -> None:
    half(averaged_run, tmp_path / "run")
    before = (tmp_path / "run" / "state.safetensors").read_bytes()
    with pytest.raises(StateError, match="name those it began with") as caught:
        train_recipe(at(averaged_run / "last.safetensors"), folder=tmp_path / "run", device="cpu", resume=True)
    digests = [tensors_digest(weights(averaged_run / f"{name}.safetensors"))[:16] for name in ("average-best", "last")]
    assert all(digest in str(caught.value) for digest in digests)
    assert (tmp_path / "run" / "state.safetensors").read_bytes() == before
    torch.save({"head.weight": torch.zeros(10, 64)}, tmp_path / "odd.pt")
    with pytest.raises(ConfigError, match="the weights do not fit"):
        train_recipe(at(tmp_path / "odd.pt"), folder=tmp_path / "run", device="cpu", resume=True)
    with pytest.raises(StateError, match=r"model\.weights: .* there, None .*asked for"):
        train_recipe(at(None), folder=tmp_path / "run", device="cpu", resume=True)
    assert train_recipe(at(averaged_run), folder=tmp_path / "run", device="cpu", resume=True).status == "finished"


def test_a_run_that_has_begun_needs_them_no_more(
    averaged_run: Path, averaged: dict[str, Tensor], tmp_path: Path
) -> None:
    whole = train_recipe(at(averaged_run), folder=tmp_path / "whole", device="cpu")
    moved = tmp_path / "moved"
    shutil.copytree(averaged_run, moved)
    half(moved, tmp_path / "run")
    shutil.rmtree(moved)
    told = Told()
    run = train_recipe(at(moved), folder=tmp_path / "run", device="cpu", resume=True, progress=told)
    assert told.said[0].startswith("model.weights: there is no run folder")
    assert told.said[0].endswith("the run goes on with the weights it has")
    for name in ("best.safetensors", "last.safetensors"):
        if (whole.folder / name).exists():
            assert same(weights(run.folder / name), weights(whole.folder / name))
    meta = load(run.folder / "state.safetensors")[1]
    assert meta["start"] == tensors_digest(averaged), "it still knows what it began with"
    assert 0 <= evaluate_run(run, attacks=["fgsm"], which="last", limit=20).robust <= 1
    assert same(flatrock.load(run.folder / "last.safetensors").state_dict(), weights(run.folder / "last.safetensors"))
    with pytest.raises(StateError, match="there is no run folder"):  # nothing to resume: a new run would begin
        train_recipe(at(moved), folder=tmp_path / "new", device="cpu", resume=True)


def test_rows_of_results_tell_what_a_run_began_with(averaged_run: Path, tmp_path: Path) -> None:
    keys = {**FEW, "model.weights": str(averaged_run)}
    run = train_recipe(load_recipe("digits_finetune", keys), folder=tmp_path / "run", device="cpu")
    row = collect_run(run.folder)
    assert row.provenance["start"]["recipe"] == "digits_standard"
    (told,) = [c for c in row.changes if c.startswith("model.weights")]
    assert told.startswith("model.weights: digits_standard, changed ("), "fewer samples than the library says"
    assert told.endswith(") instead of digits_standard")
    named = {"recipe": "digits_standard", "recipe_hash": recipe_hash(load_recipe("digits_standard"))}
    whole = load_recipe("digits_finetune")
    assert other_sources(whole, {"start": named}) == []
    told = other_sources(whole, {"start": {"file": "w.pt", "weights": "0123456789abcdef"}})
    assert told == ["model.weights: w.pt (0123456789ab) instead of digits_standard"]
    other = other_sources(load_recipe("digits_at"), {"start": {**named, "weights": "0123456789abcdef"}})
    assert other == ["model.weights: digits_standard (0123456789ab) instead of none"]


def test_the_library_begins_with_runs_that_can_be_trained() -> None:
    for name in ("digits_finetune", "cifar10_atent_finetune_wrn34"):
        recipe = load_recipe(name)
        named = Path(str(recipe.model.weights))
        first = load_recipe(named.name)
        assert named == Path("runs") / first.name
        assert (first.objective.name, first.data) == ("standard", recipe.data)
        assert first.model == recipe.model.model_copy(update={"weights": None})
