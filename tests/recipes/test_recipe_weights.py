"""Recipes that begin with given weights: bit for bit, other classes, other files, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from foreign_cases import MODULE
from foreign_nets import WideNet, randomised
from safetensors.torch import save_file
from start_cases import Told, at, same, weights
from torch import Tensor

import flatrock
from flatrock.core.errors import ConfigError, FlatrockError, StateError
from flatrock.core.tensorfile import load, save, tensors_digest
from flatrock.engine.folder import RunFolder
from flatrock.engine.loop import train
from flatrock.models.catalog import create_model
from flatrock.models.pretrained import load_pretrained
from flatrock.recipes.build import build_job
from flatrock.recipes.load import load_recipe
from flatrock.recipes.pieces import build_model
from flatrock.recipes.schema import Recipe
from flatrock.workflows.train import train_recipe

VIT = {"name": "vit", "depth": 1, "width": 12, "heads": 3, "patch": 4, "stride": 2}


def fault(recipe: Recipe, folder: Path) -> str:
    """What building says; it must leave nothing behind."""
    with pytest.raises(FlatrockError) as caught:
        build_job(recipe, folder=folder / "never")
    assert not (folder / "never").exists()
    return str(caught.value)


# What is taken


def test_the_first_weights_are_those_of_the_run_bit_for_bit(
    averaged_run: Path, averaged: dict[str, Tensor], tmp_path: Path
) -> None:
    told = Told()
    job = build_job(at(averaged_run), folder=tmp_path / "run", progress=told)
    assert same(job.model.state_dict(), averaged)
    assert not same(weights(averaged_run / "best.safetensors"), averaged), "averaged weights, as evaluations take them"
    assert not same(build_model(at(averaged_run)).state_dict(), averaged), "a recipe alone needs no file"
    epoch = load(averaged_run / "average-best.safetensors")[1]["record"]["epoch"]
    assert told.said == [f"begins with the weights of {averaged_run} (recipe digits_standard, epoch {epoch})"]
    assert job.provenance["start"]["weights"] == job.start == tensors_digest(averaged)
    about = job.provenance["start"]
    assert (about["recipe"], about["checkpoint"], about["head"]) == (
        "digits_standard",
        "average-best.safetensors",
        "taken",
    )


def test_without_learning_they_stay(averaged_run: Path, averaged: dict[str, Tensor], tmp_path: Path) -> None:
    """All parameters: statistics of BatchNorm see batches."""
    still = {"optimizer.lr": 0, "optimizer.weight_decay": 0, "schedule": {"name": "constant"}}
    run = train_recipe(at(averaged_run, **still), folder=tmp_path / "run", device="cpu")
    last = weights(run.folder / "last.safetensors")
    names = [name for name, _ in create_model("digits_cnn").named_parameters()]
    assert len(names) > 4
    assert all(torch.equal(last[k], averaged[k]) for k in names)


def test_training_from_a_run_is_training_from_its_weights(averaged_run: Path, tmp_path: Path) -> None:
    """Random draws of a step do not depend on what the network was filled with."""
    filled, drawn = (build_job(at(start), folder=tmp_path / "run") for start in (averaged_run, None))
    load_pretrained(drawn.model, weights(averaged_run / "average-best.safetensors"))  # type: ignore[arg-type]
    ends = [train(job, overwrite=True) for job in (filled, drawn)]
    assert [r.terms for r in ends[0].records] == [r.terms for r in ends[1].records]


@pytest.mark.parametrize("form", ["checkpoint", "safetensors", "torch", "wrapped"])
def test_a_checkpoint_or_a_file_of_others_will_do(
    form: str, averaged_run: Path, averaged: dict[str, Tensor], tmp_path: Path
) -> None:
    file = {"checkpoint": averaged_run / "average-best.safetensors", "safetensors": tmp_path / "w.safetensors"}.get(
        form, tmp_path / "w.pt"
    )
    if form == "safetensors":
        save_file(averaged, file)
    elif form == "torch":
        torch.save(averaged, file)
    elif form == "wrapped":
        torch.save({"ema": {f"module.{k}": v for k, v in averaged.items()}, "epoch": 3}, file)
    told = Told()
    job = build_job(at(file), folder=tmp_path / "run", progress=told)
    assert same(job.model.state_dict(), averaged)
    assert job.start == tensors_digest(averaged), "the same weights, whatever file they are in"
    about = job.provenance["start"]
    if form == "checkpoint":
        assert about["checkpoint"] == file.name
    else:
        assert about["file"] == file.name
        assert (about["entry"], about["averaged"]) == (("ema", True) if form == "wrapped" else ("", False))
        assert told.said[0].endswith("which do not tell how inputs were normalised: model.normalize is None")


@pytest.mark.usefixtures("made_up_data")
def test_weights_of_another_project_are_converted(tmp_path: Path) -> None:
    """A WideResNet under the names of TRADES, asked beside the network written for the tests."""
    net = randomised(WideNet(10, 1)).float().eval()
    torch.save({"state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}}, tmp_path / "wide.pt")
    keys = {"data.held_out": 16, "train.batch_size": 8, "model.name": "wide_resnet", "model.depth": 10}
    keys |= {"model.width": 1, "model.weights": str(tmp_path / "wide.pt")}
    job = build_job(load_recipe("cifar10_trades_linf", keys), folder=tmp_path / "run")
    x = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(job.model.eval()(x), net(x), rtol=1e-4, atol=1e-5)


def test_another_number_of_classes_keeps_the_drawn_head(
    averaged_run: Path, averaged: dict[str, Tensor], tmp_path: Path
) -> None:
    file = tmp_path / "seven.pt"
    torch.save({k: v[:7] if k.startswith("head.") else v for k, v in averaged.items()}, file)
    told = Told()
    recipe = at(file)
    job = build_job(recipe, folder=tmp_path / "run", progress=told)
    drawn, got = build_model(recipe).state_dict(), job.model.state_dict()
    heads = [k for k in got if k.startswith("head.")]
    assert all(torch.equal(got[k], drawn[k]) for k in heads)
    assert all(torch.equal(got[k], averaged[k]) for k in got if k not in heads)
    assert len(told.said) == 1
    assert told.said[0].endswith("; the head stays as drawn (7 classes there, 10 here)")
    run = train(job)
    about = RunFolder(run.folder).read_info()["provenance"]["start"]
    assert about["head"] == "as drawn (7 classes there, 10 here)"


def test_a_transformer_for_other_patches(tmp_path: Path) -> None:
    big = create_model("vit", depth=1, width=12, heads=3, patch=8, input_shape=[1, 32, 32], num_classes=6, seed=5)
    save_file(big.state_dict(), tmp_path / "big.safetensors")
    recipe = at(tmp_path / "big.safetensors", model={**VIT, "weights": str(tmp_path / "big.safetensors")})
    job = build_job(recipe, folder=tmp_path / "run")
    expected = build_model(recipe)
    load_pretrained(expected, big.state_dict())
    assert same(job.model.state_dict(), expected.state_dict())
    assert job.model.state_dict()["pos_embed"].shape != big.state_dict()["pos_embed"].shape
    assert job.provenance["start"]["head"] == "as drawn (6 classes there, 10 here)"


@pytest.mark.parametrize("named", ["as made", "as a run has them"])
def test_a_network_of_ones_own(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "starting_module.py").write_text(MODULE.replace("def net():", "def net() -> nn.Module:"))
    keys = {"model.name": "starting_module:net", "seed": 3}
    there = build_model(load_recipe("digits_at", keys)).state_dict()
    names = {"head.": "4.", "network.": ""}
    if named == "as made":
        there = {next(b + k.removeprefix(a) for a, b in names.items() if k.startswith(a)): v for k, v in there.items()}
        assert {"1.weight", "2.running_mean", "4.bias"} < there.keys()
    torch.save(there, tmp_path / "mine.pt")
    job = build_job(at(tmp_path / "mine.pt", **{**keys, "seed": 0}), folder=tmp_path / "run")
    assert same(job.model.state_dict(), build_model(load_recipe("digits_at", keys)).state_dict())


def test_from_python(averaged_run: Path, averaged: dict[str, Tensor], tmp_path: Path) -> None:
    few = {"data": {"limit": 64}, "train": {"epochs": 1, "batch_size": 64}, "attack": {"steps": 1}}
    for start in (averaged_run, str(averaged_run)):
        run = flatrock.train(
            "digits_at", model={"weights": start}, folder=tmp_path / "run", device="cpu", overwrite=True, **few
        )
        info = json.loads((run.folder / "run.json").read_text())
        assert info["provenance"]["start"]["weights"] == tensors_digest(averaged)
        assert "weights" in (run.folder / "recipe.yaml").read_text()


# What is refused


@pytest.mark.parametrize(
    ("start", "cure"),
    [
        ("runs/digits_standard", "train it first: flatrock train digits_standard"),
        ("else/digits_standard", "train it first: flatrock train digits_standard --run-dir else/digits_standard"),
        ("mine.pt", "name a run, one of its checkpoints or a weights file"),
    ],
)
def test_what_is_missing_is_named(start: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = fault(at(start), tmp_path)
    assert text == f"model.weights: there is no run folder, checkpoint or weights file {start}; {cure}"


def test_all_that_does_not_fit_is_listed(averaged_run: Path, averaged: dict[str, Tensor], tmp_path: Path) -> None:
    odd = {k: v for k, v in averaged.items() if k != "bn1.weight"}
    odd |= {"head.weight": torch.zeros(10, 3), "more.weight": torch.zeros(2)}
    torch.save(odd, tmp_path / "odd.pt")
    text = fault(at(tmp_path / "odd.pt"), tmp_path)
    assert text.startswith("model.weights: the weights do not fit this DigitsCNN; name the network they belong to")
    width = averaged["head.weight"].shape[1]
    for line in ("missing (1): bn1.weight", "extra (1): more.weight", f"head.weight is [10, 3], not [10, {width}]"):
        assert line in text


def test_another_network_is_refused(averaged_run: Path, tmp_path: Path) -> None:
    text = fault(at(averaged_run, model={**VIT, "weights": str(averaged_run)}), tmp_path)
    assert "the weights do not fit this VisionTransformer" in text
    assert "missing (" in text


def test_as_many_heads_as_the_transformer_of_the_run(tmp_path: Path) -> None:
    run = train_recipe(at(None, model=VIT, **{"train.max_steps": 1}), folder=tmp_path / "vit", device="cpu")
    recipe = at(None, model={**VIT, "heads": 2, "weights": str(run.folder / "last.safetensors")})
    assert "is a transformer of 3 heads, this one has 2" in fault(recipe, tmp_path)


@pytest.mark.parametrize(
    ("there", "here", "cure"),
    [("centered", None, "say model.normalize=centered"), (None, "centered", "say model.normalize=null")],
)
def test_another_normalisation_is_refused(there: str | None, here: str | None, cure: str, tmp_path: Path) -> None:
    keys = {"model.normalize": there, "train.max_steps": 1}
    run = train_recipe(at(None, **keys), folder=tmp_path / "there", device="cpu")
    file = run.folder / "last.safetensors"
    text = fault(at(file, **{"model.normalize": here}), tmp_path)
    assert f"was trained with model.normalize {there!r}, this recipe has {here!r}" in text
    assert text.endswith(cure)
    job = build_job(at(file, **{"model.normalize": there}), folder=tmp_path / "run")
    assert same(job.model.state_dict(), weights(file))


@pytest.mark.parametrize(
    ("mean", "cure"), [(0.47, "say model.normalize=centered"), (0.3, "save it without them to go on with the recipe's")]
)
def test_a_file_that_says_how_it_normalises(
    mean: float, cure: str, averaged: dict[str, Tensor], tmp_path: Path
) -> None:
    torch.save({**averaged, "mean": torch.tensor([mean]), "std": torch.tensor([0.25])}, tmp_path / "w.pt")
    text = fault(at(tmp_path / "w.pt"), tmp_path)
    assert f"comes with mean ({mean}), std (0.25), this recipe has model.normalize None" in text
    assert text.endswith(cure)
    if mean == 0.47:
        told = Told()
        job = build_job(
            at(tmp_path / "w.pt", **{"model.normalize": "centered"}), folder=tmp_path / "run", progress=told
        )
        assert torch.equal(job.model.state_dict()["conv1.weight"], averaged["conv1.weight"])
        assert told.said == [f"begins with the weights of {tmp_path / 'w.pt'}"]


def test_weights_that_are_not_finite_are_refused(averaged: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({**averaged, "head.bias": torch.full((10,), float("nan"))}, tmp_path / "nan.pt")
    assert "the weights are not finite (1 tensors, first head.bias)" in fault(at(tmp_path / "nan.pt"), tmp_path)


def test_no_code_of_a_file_is_run(tmp_path: Path) -> None:
    torch.save(create_model("digits_cnn"), tmp_path / "whole.pt")
    assert "reading it would run code from the file, so it is refused" in fault(at(tmp_path / "whole.pt"), tmp_path)


def test_a_run_that_is_not_finished_or_chosen_on_the_test_set(averaged_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "half"
    shutil.copytree(averaged_run, folder)
    RunFolder(folder).write_info(status="running")
    assert "is not finished (its process is gone); train on with --resume, or name one of its checkpoints" in fault(
        at(folder), tmp_path
    )
    build_job(at(folder / "last.safetensors"), folder=tmp_path / "run")
    tensors, meta = load(averaged_run / "best.safetensors")
    meta["recipe"]["select"]["data"] = "test"
    save(tmp_path / "tested.safetensors", tensors, meta)
    assert "was chosen on the test set" in fault(at(tmp_path / "tested.safetensors"), tmp_path)


@pytest.mark.parametrize("part", ["", "last.safetensors"])
def test_a_run_does_not_begin_with_what_it_replaces(averaged_run: Path, tmp_path: Path, part: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(averaged_run, folder)
    before = (folder / "best.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="is of the run folder this run would be written to; choose another"):
        train_recipe(at(folder / part), folder=folder, device="cpu", overwrite=True)
    assert (folder / "best.safetensors").read_bytes() == before


def test_what_is_missing_costs_no_run(averaged_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(averaged_run, folder)
    with pytest.raises(StateError, match="there is no run folder"):
        train_recipe(at(tmp_path / "gone"), folder=folder, device="cpu", overwrite=True)
    assert RunFolder(folder).run().status == "finished"
